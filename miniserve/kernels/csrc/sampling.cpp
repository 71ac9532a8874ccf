// Choosing tokens from logits.

#include <limits>

#include "kernels.h"
#include "threads.h"

namespace miniserve {
namespace {

struct Largest {
  int64_t id;
  float value;
};

// Within a stretch of this many logits, which stay in the first-level cache, finding NaN and the maximum are two loops
// that the compiler makes fast.
constexpr int64_t kStretch = 1024;

Largest largest_of(const float* x, int64_t size) {
  Largest best{0, -std::numeric_limits<float>::infinity()};
  for (int64_t start = 0; start < size; start += kStretch) {
    const int64_t end = std::min(start + kStretch, size);
    int has_nan = 0;
    for (int64_t i = start; i < end; i++) has_nan |= x[i] != x[i];
    if (has_nan) return {0, std::numeric_limits<float>::quiet_NaN()};
    Vec most = broadcast(best.value);
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) most = max(most, load(x + i));
    float value = largest(most);
    for (; i < end; i++) value = std::max(value, x[i]);
    if (value > best.value) {
      best = {start, value};
      while (x[best.id] != value) best.id++;
    }
  }
  return best;
}

}  // namespace

void largest_of_rows(const float* logits, int64_t num_rows, int64_t size, int64_t stride, int64_t* ids, float* values,
                     int num_threads) {
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_rows, thread, threads);
    for (int64_t row = own.begin; row < own.end; row++) {
      const Largest best = largest_of(logits + row * stride, size);
      ids[row] = best.id;
      values[row] = best.value;
    }
  });
}

}  // namespace miniserve
