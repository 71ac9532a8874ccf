// What the registrations of operators share: checks between tensors and the plain C++ of `kernels.h`.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"
#include "recording.h"

// The macros take their first argument as it is written; this one lets the namespace's macro be replaced before.
#define MINISERVE_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define MINISERVE_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

namespace miniserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Calls call(sizes, num_threads) now, or keeps it for replays. It holds pointers, and no tensors.
template <class F>
void perform(const Sizes& sizes, const F& call) {
  is_recording() ? keep(sizes, call) : call(sizes, num_threads());
}

inline void check(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dims) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected ", torch::headeronly::toString(dtype), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == dims, name, ": expected ", dims, " dimensions, got ", tensor.dim());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected to be contiguous");
}

inline const float* optional_floats(const std::optional<Tensor>& tensor, const char* name, int64_t size) {
  if (!tensor) return nullptr;
  check(*tensor, name, ScalarType::Float, 1);
  STD_TORCH_CHECK(tensor->size(0) == size, name, ": expected ", size, " values, got ", tensor->size(0));
  return static_cast<const float*>(tensor->data_ptr());
}

// Calls f with a null pointer to E: bf16 or float, as `dtype` says.
template <class F>
void for_dtype(ScalarType dtype, const char* name, F f) {
  if (dtype == ScalarType::BFloat16) {
    f(static_cast<bf16*>(nullptr));
  } else {
    STD_TORCH_CHECK(dtype == ScalarType::Float, name, ": expected bfloat16 or float32, got ",
                    torch::headeronly::toString(dtype));
    f(static_cast<float*>(nullptr));
  }
}

inline int64_t whole_panels(int64_t columns) { return (columns + kChunk - 1) / kChunk * kChunk; }

}  // namespace miniserve
