// Which tokens of rows of logits are allowed, the best of them, and how probable tokens are.

#include "kernels.h"
#include "logit_row.h"
#include "threads.h"

namespace miniserve {
namespace {

struct Largest {
  int64_t id;
  float value;
};

// Within a stretch, which stays in the first-level cache, finding NaN and the maximum are two loops that the compiler
// makes fast.
Largest largest_of(const float* x, int64_t size) {
  Largest best{0, -kInfinity};
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

// The first `num_top` of the row; `smallest` and `largest` are those of the row.
std::vector<Element> first_of(const float* x, int64_t size, int64_t num_top, float smallest, float largest) {
  const Band band = search(x, size, smallest, largest, static_cast<double>(num_top), Ones());
  std::vector<Element> elements = elements_between(x, size, band.low, kInfinity);
  std::partial_sort(elements.begin(), elements.begin() + num_top, elements.end(), comes_first);
  return elements;
}

void token_logprobs_of(const float* x, int64_t size, int64_t id, int64_t num_top, int32_t* rank, float* logprobs,
                       int32_t* top_ids) {
  Vec most = broadcast(-kInfinity), least = broadcast(kInfinity);
  *rank = 1;
  for_lanes(x, size, [&](int64_t first, Vec lanes) {
    most = max(most, lanes);
    least = min(least, first + kLanes <= size ? lanes : load_part(x + first, size - first, kInfinity));
    *rank += std::popcount(bits(greater(lanes, broadcast(x[id]))));
  });
  const float top = largest(most);
  // NaN from NaN, from +inf and from nothing but -inf. Behind the end of the row, e^-87 adds nothing.
  const double total = sum_of(x, size, [&](int64_t, Vec lanes) { return exp(lanes - broadcast(top)); });
  const auto logprob = [&](float value) {
    return static_cast<float>(static_cast<double>(value) - top - std::log(total));
  };
  logprobs[0] = logprob(x[id]);
  if (std::isnan(total)) {
    std::fill(logprobs, logprobs + 1 + num_top, std::numeric_limits<float>::quiet_NaN());
    std::fill(top_ids, top_ids + num_top, 0);
    return;
  }
  if (num_top == 0) return;
  const std::vector<Element> best = first_of(x, size, num_top, -largest(zeros() - least), top);
  for (int64_t i = 0; i < num_top; i++) {
    logprobs[1 + i] = logprob(best[i].value);
    top_ids[i] = best[i].index;
  }
}

void forbid_in_row(const float* x, int64_t size, const uint32_t* mask, float* out) {
  const auto forbid_in_word = [](const float* from, uint32_t allowed, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) {
      const float value = from[i];  // read in any case, so that no branch depends on the mask
      to[i] = allowed >> i & 1 ? value : -kInfinity;
    }
  };
  int64_t first = 0;
  for (; first + 32 <= size; first += 32) forbid_in_word(x + first, *mask++, 32, out + first);
  if (first < size) forbid_in_word(x + first, *mask, size - first, out + first);
}

}  // namespace

void forbid(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const uint32_t* masks, float* out,
            int num_threads) {
  const int64_t words = (size + 31) / 32;
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_rows, thread, threads);
    for (int64_t row = own.begin; row < own.end; row++) {
      forbid_in_row(logits + row * stride, size, masks + row * words, out + row * size);
    }
  });
}

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

void token_logprobs(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const int64_t* ids,
                    int64_t num_top, int32_t* ranks, float* logprobs, int32_t* top_ids, int num_threads) {
  Shares rows(num_rows, num_threads);
  parallel(num_threads, [&](int thread, int) {
    for (int64_t row; (row = rows.next(thread)) >= 0;) {
      token_logprobs_of(logits + row * stride, size, ids[row], num_top, ranks + row, logprobs + row * (1 + num_top),
                        top_ids + row * num_top);
    }
  });
}

}  // namespace miniserve
