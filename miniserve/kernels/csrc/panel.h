// What becomes of the sums of 32 columns of a product: bias, gate, and where they go.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "threads.h"

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
      case Epilogue::kGate:
        return put_gated(sums, first_row, count, panel);
      case Epilogue::kGateTiles:
        return put_in_tiles(sums, first_row, count, panel);
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
        const Vec low = load(sums), high = load(sums + kLanes);
        store(out, add ? load(out) + low : low, add ? load(out + kLanes) + high : high);
      } else {
        for (int64_t i = 0; i < left; i++) set(out[i], add ? to_float(out[i]) + sums[i] : sums[i]);
      }
    }
  }

  // A panel's first half are gates, its second half is what they let through.
  Vec gated(const float* sums) const {
    const Vec gate = load(sums), up = load(sums + kLanes);
    switch (out_.activation) {
      case Activation::kSilu:
        return silu(gate) * up;
      case Activation::kGeluTanh:
        return gelu_tanh(gate) * up;
      case Activation::kClampedSwiglu:
        return clamped_swiglu(gate, up);
    }
    return zeros();
  }

  void put_gated(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t columns = columns_ / 2, left = columns - panel * kLanes;
    E* out = static_cast<E*>(out_.data) + first_row * columns + panel * kLanes;
    for (int64_t r = 0; r < count; r++, sums += kChunk, out += columns) {
      if (left >= kLanes) {
        store(out, gated(sums));
      } else {
        float lanes[kLanes];
        store(lanes, gated(sums));
        for (int64_t i = 0; i < left; i++) set(out[i], lanes[i]);
      }
    }
  }

  // With zeros behind the last column, up to the end of its chunk.
  void put_in_tiles(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t columns = columns_ / 2, column = panel * kLanes, left = columns - column;
    const int64_t tile_size = kTileRows * round_up(columns, kChunk);
    E* tiles = static_cast<E*>(out_.data) + column / kChunk * kRowTileSize + column % kChunk;
    for (int64_t row = first_row; row < first_row + count; row++, sums += kChunk) {
      E* out = tiles + row / kTileRows * tile_size + row % kTileRows * kChunk;
      if (left >= kLanes) {
        store(out, gated(sums));
      } else {
        float lanes[kLanes];
        store(lanes, gated(sums));
        std::fill(lanes + left, lanes + kLanes, 0.0f);
        store(out, load(lanes));
      }
      if (left <= kLanes && column % kChunk == 0) store(out + kLanes, zeros());
    }
  }

  int64_t columns_;
  const float* bias_;  // may be null
  const Output& out_;
};

}  // namespace miniserve
