// What a linear layer does to its input rows before they are multiplied.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace miniserve {

// Sixteen elements of x [size] from k; zeros behind its end.
template <class T>
Vec load_padded(const T* x, int64_t k, int64_t size) {
  if (k + kLanes <= size) return load(x + k);
  T lanes[kLanes] = {};
  std::copy(x + std::min(k, size), x + size, lanes);
  return load(lanes);
}

// One input row of elements T, normalised as it is read.
template <class T>
class InputRow {
 public:
  InputRow() = default;
  InputRow(const Rows& rows, int64_t m)
      : InputRow(static_cast<const T*>(rows.data) + m * rows.size, rows.size, rows.norm, rows.eps) {}
  InputRow(const T* x, int64_t size, const float* norm, float eps) : x_(x), size_(size), norm_(norm) {
    if (norm_) inverse_ = 1.0f / root_mean_square(eps);
  }

  // Sixteen elements from k; zeros behind the row's end.
  Vec at(int64_t k) const {
    const Vec x = load_padded(x_, k, size_);
    return norm_ ? x * broadcast(inverse_) * load_padded(norm_, k, size_) : x;
  }

 private:
  float root_mean_square(float eps) const {
    Vec squares = zeros();
    for (int64_t k = 0; k < size_; k += kLanes) {
      const Vec x = load_padded(x_, k, size_);
      squares = fma(x, x, squares);
    }
    return std::sqrt(sum(squares) / static_cast<float>(size_) + eps);
  }

  const T* x_;
  int64_t size_;
  const float* norm_;  // may be null
  float inverse_;      // of the root mean square, where there is a norm
};

// Input row `m`, normalised: row [padded], zeros behind its end and for rows beyond the last.
template <class E>
void read_row(const Rows& rows, int64_t m, int64_t padded, float* row) {
  if (m >= rows.count) {
    std::fill(row, row + padded, 0.0f);
    return;
  }
  const auto copy = [&](const auto& input) {
    for (int64_t k = 0; k < padded; k += kLanes) store(row + k, input.at(k));
  };
  if (rows.is_float) {
    copy(InputRow<float>(rows, m));
  } else {
    copy(InputRow<E>(rows, m));
  }
}

}  // namespace miniserve
