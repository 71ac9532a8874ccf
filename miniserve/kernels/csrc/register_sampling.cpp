// What is done with logits, as torch calls it.

#include <vector>

#include "checks.h"

namespace miniserve {
namespace {

void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2 && logits.stride(1) == 1,
                  "logits: expected float32 [num_rows, size], each row next to each other");
}

// `ids`: a token for each row of logits.
const int64_t* check_tokens(const Tensor& ids, const Tensor& logits) {
  check(ids, "ids", ScalarType::Long, 1);
  STD_TORCH_CHECK(ids.size(0) == logits.size(0), "ids: ", ids.size(0), " do not fit ", logits.size(0), " rows");
  const auto* data = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < ids.size(0); i++) {
    STD_TORCH_CHECK(data[i] >= 0 && data[i] < logits.size(1), "ids: ", data[i], " is not below ", logits.size(1));
  }
  return data;
}

void forbid_op(const Tensor& logits, const Tensor& masks, const Tensor& out) {
  check_logits(logits);
  check(masks, "masks", ScalarType::Int, 2);
  check(out, "out", ScalarType::Float, 2);
  const int64_t num_rows = logits.size(0), size = logits.size(1);
  STD_TORCH_CHECK(masks.size(0) == num_rows && masks.size(1) == (size + 31) / 32, "masks: of ", masks.size(0), " by ",
                  masks.size(1), ", which do not fit ", num_rows, " rows of ", size);
  STD_TORCH_CHECK(out.size(0) == num_rows && out.size(1) == size, "out: of ", out.size(0), " by ", out.size(1),
                  ", expected ", num_rows, " by ", size);
  forbid(static_cast<const float*>(logits.data_ptr()), num_rows, size, logits.stride(0),
         static_cast<const uint32_t*>(masks.data_ptr()), static_cast<float*>(out.data_ptr()), num_threads());
}

void largest_of_rows_op(const Tensor& logits, const Tensor& ids, const Tensor& values) {
  check_logits(logits);
  check(ids, "ids", ScalarType::Long, 1);
  check(values, "values", ScalarType::Float, 1);
  STD_TORCH_CHECK(ids.size(0) == logits.size(0) && values.size(0) == logits.size(0) && logits.size(1) > 0,
                  "ids and values do not fit ", logits.size(0), " rows");
  largest_of_rows(static_cast<const float*>(logits.data_ptr()), logits.size(0), logits.size(1), logits.stride(0),
                  static_cast<int64_t*>(ids.data_ptr()), static_cast<float*>(values.data_ptr()), num_threads());
}

void token_logprobs_op(const Tensor& logits, const Tensor& ids, const Tensor& ranks, const Tensor& logprobs,
                       const Tensor& top_ids) {
  check_logits(logits);
  const int64_t* id_data = check_tokens(ids, logits);
  check(ranks, "ranks", ScalarType::Int, 1);
  check(logprobs, "logprobs", ScalarType::Float, 2);
  check(top_ids, "top_ids", ScalarType::Int, 2);
  const int64_t num_rows = logits.size(0), num_top = top_ids.size(1);
  STD_TORCH_CHECK(ranks.size(0) == num_rows, "ranks: ", ranks.size(0), " do not fit ", num_rows, " rows");
  STD_TORCH_CHECK(top_ids.size(0) == num_rows && num_top <= logits.size(1), "top_ids: of ", top_ids.size(0), " by ",
                  num_top, ", which does not fit ", num_rows, " rows of ", logits.size(1));
  STD_TORCH_CHECK(logprobs.size(0) == num_rows && logprobs.size(1) == 1 + num_top, "logprobs: of ", logprobs.size(0),
                  " by ", logprobs.size(1), ", expected ", num_rows, " by ", 1 + num_top);
  token_logprobs(static_cast<const float*>(logits.data_ptr()), num_rows, logits.size(1), logits.stride(0), id_data,
                 num_top, static_cast<int32_t*>(ranks.data_ptr()), static_cast<float*>(logprobs.data_ptr()),
                 static_cast<int32_t*>(top_ids.data_ptr()), num_threads());
}

// One value for each row of logits.
template <class T>
const T* of_rows(const Tensor& tensor, const char* name, ScalarType dtype, const Tensor& logits) {
  check(tensor, name, dtype, 1);
  STD_TORCH_CHECK(tensor.size(0) == logits.size(0), name, ": ", tensor.size(0), " do not fit ", logits.size(0), " rows");
  return static_cast<const T*>(tensor.data_ptr());
}

void draw_op(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
             const Tensor& min_p, const Tensor& seeds, const Tensor& ids) {
  check_logits(logits);
  check_tokens(ids, logits);
  const float* temperatures = of_rows<float>(temperature, "temperature", ScalarType::Float, logits);
  const int64_t* top_ks = of_rows<int64_t>(top_k, "top_k", ScalarType::Long, logits);
  const float* top_ps = of_rows<float>(top_p, "top_p", ScalarType::Float, logits);
  const float* min_ps = of_rows<float>(min_p, "min_p", ScalarType::Float, logits);
  const int64_t* row_seeds = of_rows<int64_t>(seeds, "seeds", ScalarType::Long, logits);
  std::vector<Draw> draws;
  for (int64_t i = 0; i < logits.size(0); i++) {
    draws.push_back({temperatures[i], top_ks[i], top_ps[i], min_ps[i], static_cast<uint64_t>(row_seeds[i])});
  }
  draw(static_cast<const float*>(logits.data_ptr()), logits.size(0), logits.size(1), logits.stride(0), draws.data(),
       static_cast<int64_t*>(ids.data_ptr()), num_threads());
}

}  // namespace

MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CPU, library) {
  library.impl("forbid", TORCH_BOX(&forbid_op));
  library.impl("largest_of_rows", TORCH_BOX(&largest_of_rows_op));
  library.impl("token_logprobs", TORCH_BOX(&token_logprobs_op));
  library.impl("draw", TORCH_BOX(&draw_op));
}

}  // namespace miniserve
