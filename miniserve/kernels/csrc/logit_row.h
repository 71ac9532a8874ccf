// What is asked of a row of logits: sums over it in a fixed order, and its first elements in the order of their values.
//
// First means: larger values first, and of equals the smaller index. Nothing is sorted but a few elements: the value
// down to which elements are wanted is found by bisection, each step of which is one fast pass over the row.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace miniserve {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Within a stretch of this many elements, sums are in fp32; those of stretches are added in double precision.
constexpr int64_t kStretch = 1024;

// Calls f(first, lanes) for each sixteen elements in order; behind the end, lanes are -inf.
template <class F>
inline void for_lanes(const float* x, int64_t size, F f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, load(x + i));
  if (i < size) f(i, load_part(x + i, size - i, -kInfinity));
}

// The sum of f(first, lanes), as above.
template <class F>
inline double sum_of(const float* x, int64_t size, F f) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kStretch) {
    Vec part = zeros();
    for_lanes(x + start, std::min(kStretch, size - start),
              [&](int64_t first, Vec lanes) { part = part + f(start + first, lanes); });
    total += sum(part);
  }
  return total;
}

struct Element {
  float value;
  int32_t index;
};

inline bool comes_first(const Element& a, const Element& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

// What elements count for in the search below: each for one, or for its weight. Weights are padded to whole lanes.
struct Ones {
  Vec lanes(int64_t) const { return broadcast(1.0f); }
  float of(int64_t) const { return 1.0f; }
};

struct Weights {
  const float* data;
  Vec lanes(int64_t first) const { return load(data + first); }
  float of(int64_t index) const { return data[index]; }
};

// Values from `low` to below `high`; the elements from `high` upwards count for `above`.
struct Band {
  float low, high;
  double above;
};

// A band of few elements, in which the sum over the row in order first reaches `limit` > 0; or the one that begins at
// `low` if it is not reached above that. `largest` is the largest of the row.
template <class Amounts>
Band search(const float* x, int64_t size, float low, float largest, double limit, const Amounts& amounts) {
  constexpr int64_t few = 64;
  constexpr int max_steps = 40;  // between equal elements there is nothing to be found
  Band band{low, std::nextafter(largest, kInfinity), 0.0};
  int64_t num_from_low = size, num_from_high = 0;
  for (int step = 0; step < max_steps && num_from_low - num_from_high > few; step++) {
    const float middle = band.low + (band.high - band.low) / 2;
    if (!(band.low < middle && middle < band.high)) break;
    int64_t count = 0;
    const double amount = sum_of(x, size, [&](int64_t first, Vec lanes) {
      const Lanes chosen = at_least(lanes, broadcast(middle));
      count += std::popcount(bits(chosen));
      return keep(chosen, amounts.lanes(first));
    });
    if (amount >= limit) {
      band.low = middle;
      num_from_low = count;
    } else {
      band.high = middle;
      band.above = amount;
      num_from_high = count;
    }
  }
  return band;
}

// The elements from `low` to below `high`, in no order.
inline std::vector<Element> elements_between(const float* x, int64_t size, float low, float high) {
  std::vector<Element> found;
  for_lanes(x, size, [&](int64_t first, Vec lanes) {
    uint32_t left = bits(at_least(lanes, broadcast(low)));
    for (; left; left &= left - 1) {
      const int64_t index = first + std::countr_zero(left);
      if (index < size && x[index] < high) found.push_back({x[index], static_cast<int32_t>(index)});
    }
  });
  return found;
}

}  // namespace miniserve
