// What is done to whole rows outside of a product: norms, and sums with the residual stream.

#include "rows.h"
#include "threads.h"

namespace miniserve {
namespace {

// target [size] += scale x row, a float at a time behind the last whole vector.
template <class T>
void add_row(const InputRow<T>& row, int64_t size, float scale, float* target) {
  const Vec factor = broadcast(scale);
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store(target + k, fma(row.at(k), factor, load(target + k)));
  if (k == size) return;
  float rest[kLanes] = {};
  std::copy(target + k, target + size, rest);
  store(rest, fma(row.at(k), factor, load(rest)));
  std::copy(rest, rest + size - k, target + k);
}

}  // namespace

template <class E>
void add_rows(const Rows& rows, float scale, float* out, int num_threads) {
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(rows.count, thread, threads);
    for (int64_t m = own.begin; m < own.end; m++) {
      float* target = out + m * rows.size;
      if (rows.is_float) {
        add_row(InputRow<float>(rows, m), rows.size, scale, target);
      } else {
        add_row(InputRow<E>(rows, m), rows.size, scale, target);
      }
    }
  });
}

template <class E>
void normalise_rows(E* x, int64_t count, int64_t stride, int64_t size, const float* norm, float eps, int num_threads) {
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(count, thread, threads);
    for (int64_t m = own.begin; m < own.end; m++) {
      E* target = x + m * stride;
      const InputRow<E> row(target, size, norm, eps);
      int64_t k = 0;
      for (; k + kLanes <= size; k += kLanes) store(target + k, row.at(k));
      float rest[kLanes];
      store(rest, row.at(k));
      for (int64_t i = 0; i < size - k; i++) set(target[k + i], rest[i]);
    }
  });
}

template void add_rows<bf16>(const Rows&, float, float*, int);
template void add_rows<float>(const Rows&, float, float*, int);
template void normalise_rows(bf16*, int64_t, int64_t, int64_t, const float*, float, int);
template void normalise_rows(float*, int64_t, int64_t, int64_t, const float*, float, int);

}  // namespace miniserve
