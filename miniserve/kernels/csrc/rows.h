// What a linear layer does to its input rows before they are multiplied.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace miniserve {

template <class T>
void widen(const T* x, int64_t size, float* row) {
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store(row + k, load(x + k));
  for (; k < size; k++) row[k] = to_float(x[k]);
}

// row [size], padded with zeros to whole chunks, divided by its root mean square.
inline void normalise(float* row, int64_t size, const float* norm, float eps) {
  Vec squares = zeros();
  for (int64_t k = 0; k < size; k += kLanes) {
    const Vec x = load(row + k);
    squares = fma(x, x, squares);
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for (int64_t k = 0; k < size; k++) row[k] = row[k] * inverse * norm[k];
}

// Input row `m`, normalised: row [padded], zeros behind its end and for rows beyond the last.
template <class E>
void read_row(const Rows& rows, int64_t m, int64_t padded, float* row) {
  std::fill(row, row + padded, 0.0f);
  if (m >= rows.count) return;
  const int64_t start = m * rows.size;
  if (rows.is_float) {
    widen(static_cast<const float*>(rows.data) + start, rows.size, row);
  } else {
    widen(static_cast<const E*>(rows.data) + start, rows.size, row);
  }
  if (rows.norm) normalise(row, rows.size, rows.norm, rows.eps);
}

}  // namespace miniserve
