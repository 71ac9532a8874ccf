// What becomes of the sums of 32 columns of a product: bias, gate, and where they go.
#pragma once

#include "kernels.h"

namespace miniserve {

// `columns` [of the matrix] and `bias` [columns] or null are those of all panels.
template <class E>
class PanelOutput {
 public:
  PanelOutput(int64_t columns, const float* bias, const Output& out) : columns_(columns), bias_(bias), out_(out) {}

  // sums [count][32] of rows first_row to first_row + count; they are overwritten.
  void write(float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    if (bias_) add_bias(sums, count, bias_ + panel * kChunk);
    switch (out_.epilogue) {
      case Epilogue::kStore:
        return out_.is_float ? put<float, false>(sums, first_row, count, panel)
                             : put<E, false>(sums, first_row, count, panel);
      case Epilogue::kAdd:
        return put<float, true>(sums, first_row, count, panel);
      case Epilogue::kSiluGate:
        return put_gated(sums, first_row, count, panel);
    }
  }

 private:
  static void add_bias(float* sums, int64_t count, const float* bias) {
    const Vec low = load(bias), high = load(bias + kLanes);
    for (int64_t r = 0; r < count; r++, sums += kChunk) {
      store(sums, load(sums) + low);
      store(sums + kLanes, load(sums + kLanes) + high);
    }
  }

  template <class T, bool add>
  void put(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t left = columns_ - panel * kChunk;
    T* out = static_cast<T*>(out_.data) + first_row * columns_ + panel * kChunk;
    for (int64_t r = 0; r < count; r++, sums += kChunk, out += columns_) {
      if (left >= kChunk) {
        store(out, add ? load(out) + load(sums) : load(sums));
        store(out + kLanes, add ? load(out + kLanes) + load(sums + kLanes) : load(sums + kLanes));
      } else {
        for (int64_t i = 0; i < left; i++) set(out[i], add ? to_float(out[i]) + sums[i] : sums[i]);
      }
    }
  }

  // A panel's first half are gates, its second half is what they let through.
  void put_gated(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t columns = columns_ / 2, left = columns - panel * kLanes;
    E* out = static_cast<E*>(out_.data) + first_row * columns + panel * kLanes;
    for (int64_t r = 0; r < count; r++, sums += kChunk, out += columns) {
      const Vec y = silu(load(sums)) * load(sums + kLanes);
      if (left >= kLanes) {
        store(out, y);
      } else {
        float lanes[kLanes];
        store(lanes, y);
        for (int64_t i = 0; i < left; i++) set(out[i], lanes[i]);
      }
    }
  }

  int64_t columns_;
  const float* bias_;  // may be null
  const Output& out_;
};

}  // namespace miniserve
