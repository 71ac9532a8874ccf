// Attention and what is done to rows between products, as torch calls them.

#include <limits>

#include "checks.h"

namespace miniserve {
namespace {

Step step_of(const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_tables, int64_t num_tokens) {
  check(query_start, "query_start", ScalarType::Int, 1);
  check(seq_lens, "seq_lens", ScalarType::Int, 1);
  check(block_tables, "block_tables", ScalarType::Long, 2);
  const Step step{num_tokens,
                  seq_lens.size(0),
                  block_tables.size(1),
                  static_cast<const int32_t*>(query_start.data_ptr()),
                  static_cast<const int32_t*>(seq_lens.data_ptr()),
                  static_cast<const int64_t*>(block_tables.data_ptr())};
  STD_TORCH_CHECK(query_start.size(0) == step.num_requests + 1 && block_tables.size(0) == step.num_requests,
                  "query_start and block_tables do not fit ", step.num_requests, " requests");
  return step;
}

// What a step holds, which changes from one replay to the next.
void check_step(const Step& step, int64_t num_blocks, int64_t block_size, int64_t num_positions) {
  STD_TORCH_CHECK(step.query_start[0] == 0 && step.query_start[step.num_requests] == step.num_tokens,
                  "query_start must go from 0 to ", step.num_tokens);
  for (int64_t i = 0; i < step.num_requests; i++) {
    const int64_t num_new = step.query_start[i + 1] - step.query_start[i];
    STD_TORCH_CHECK(num_new >= 0 && num_new <= step.seq_lens[i], "request ", i, ": ", num_new, " new tokens of ",
                    step.seq_lens[i]);
    STD_TORCH_CHECK(step.seq_lens[i] <= num_positions, "request ", i, ": ", step.seq_lens[i], " tokens, but ",
                    num_positions, " positions");
    const int64_t used = (step.seq_lens[i] + block_size - 1) / block_size;
    STD_TORCH_CHECK(used <= step.max_blocks, "request ", i, ": ", used, " blocks in a table of ", step.max_blocks);
    for (int64_t b = 0; b < used; b++) {
      const int64_t block = step.block_tables[i * step.max_blocks + b];
      STD_TORCH_CHECK(block >= 0 && block < num_blocks, "request ", i, ": block ", block, " of ", num_blocks);
    }
  }
}

// The heads of qkv, and what is done to them before attention.
Heads heads_of(const Tensor& qkv, int64_t num_kv_heads, const std::optional<Tensor>& rope,
               const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps) {
  const int64_t num_heads = qkv.size(1) - 2 * num_kv_heads, head_dim = qkv.size(2);
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " query heads for ",
                  num_kv_heads, " key heads");
  STD_TORCH_CHECK(head_dim <= 512, "head_dim: at most 512, got ", head_dim);
  Heads heads{};
  heads.num_heads = num_heads;
  heads.num_kv_heads = num_kv_heads;
  heads.head_dim = head_dim;
  if (rope) {
    check(*rope, "rope", ScalarType::Float, 3);
    heads.rope = static_cast<const float*>(rope->data_ptr());
    heads.rotary_dim = rope->size(2);
    STD_TORCH_CHECK(rope->size(1) == 2 && heads.rotary_dim <= head_dim && heads.rotary_dim % 2 == 0,
                    "rope: expected [positions, 2, rotary_dim], rotary_dim even and at most ", head_dim);
  }
  heads.q_norm = optional_floats(q_norm, "q_norm", head_dim);
  heads.k_norm = optional_floats(k_norm, "k_norm", head_dim);
  heads.eps = static_cast<float>(eps);
  return heads;
}

void attention_op(const Tensor& qkv, int64_t num_kv_heads, const std::optional<Tensor>& rope,
                  const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps, double scale,
                  double soft_cap, int64_t window, const std::optional<Tensor>& sinks, const Tensor& cache,
                  const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_tables, const Tensor& out) {
  const ScalarType dtype = qkv.scalar_type();
  check(qkv, "qkv", dtype, 3);
  check(out, "out", dtype, 3);
  const bool is_quantised = cache.scalar_type() == ScalarType::Char;
  check(cache, "cache", is_quantised ? ScalarType::Char : dtype, 5);
  Heads heads = heads_of(qkv, num_kv_heads, rope, q_norm, k_norm, eps);
  STD_TORCH_CHECK(out.size(0) == qkv.size(0) && out.size(1) == heads.num_heads && out.size(2) == heads.head_dim,
                  "out does not fit qkv");
  STD_TORCH_CHECK(cache.size(1) > 0 && cache.size(2) == num_kv_heads && cache.size(3) == 2 &&
                      cache.size(4) == cache_tile_size(heads.head_dim, is_quantised),
                  "cache does not fit ", num_kv_heads, " heads of ", heads.head_dim);
  STD_TORCH_CHECK(soft_cap >= 0.0, "soft_cap: expected 0 for none, or more, got ", soft_cap);
  STD_TORCH_CHECK(window >= 0, "window: expected 0 for none, or more, got ", window);
  heads.scale = static_cast<float>(scale);
  heads.soft_cap = static_cast<float>(soft_cap);
  heads.window = window;
  heads.sinks = optional_floats(sinks, "sinks", heads.num_heads);
  const Step step = step_of(query_start, seq_lens, block_tables, qkv.size(0));
  for_dtype(dtype, "qkv", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    auto* qkv_data = static_cast<E*>(qkv.data_ptr());
    auto* out_data = static_cast<E*>(out.data_ptr());
    const int64_t num_blocks = cache.size(0), block_size = cache.size(1) * kChunk;
    const int64_t num_positions = rope ? rope->size(0) : std::numeric_limits<int64_t>::max();
    const auto run = [&](auto* cache_data) {
      perform({step.num_tokens, step.num_requests}, [=](const Sizes& sizes, int threads) {
        const Step now = step.first(sizes.num_tokens, sizes.num_requests);
        check_step(now, num_blocks, block_size, num_positions);
        attention(qkv_data, heads, now, cache_data, block_size, out_data, threads);
      });
    };
    is_quantised ? run(static_cast<uint8_t*>(cache.data_ptr())) : run(static_cast<E*>(cache.data_ptr()));
  });
}

void add_op(const Tensor& residual, const Tensor& x, const std::optional<Tensor>& norm, double eps, double scale) {
  check(residual, "residual", ScalarType::Float, 2);
  check(x, "x", x.scalar_type(), 2);
  const int64_t size = x.size(1);
  STD_TORCH_CHECK(residual.size(0) == x.size(0) && residual.size(1) == size, "x: of ", x.size(0), " by ", size,
                  ", which does not fit the residual stream");
  const bool is_float = x.scalar_type() == ScalarType::Float;
  const Rows rows{x.data_ptr(), is_float, x.size(0), size, optional_floats(norm, "norm", size), static_cast<float>(eps)};
  auto* data = static_cast<float*>(residual.data_ptr());
  for_dtype(x.scalar_type(), "x", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    perform({rows.count, 0}, [=, factor = static_cast<float>(scale)](const Sizes& sizes, int threads) {
      add_rows<E>(rows.first(sizes.num_tokens), factor, data, threads);
    });
  });
}

void normalise_op(const Tensor& x, int64_t first, const Tensor& norm, double eps) {
  check(x, "x", x.scalar_type(), 2);
  check(norm, "norm", ScalarType::Float, 1);
  const int64_t stride = x.size(1), size = norm.size(0);
  STD_TORCH_CHECK(first >= 0 && first + size <= stride, "x: has no ", size, " columns from ", first, " on");
  const auto* weight = static_cast<const float*>(norm.data_ptr());
  for_dtype(x.scalar_type(), "x", [&](auto* type) {
    auto* data = static_cast<std::remove_pointer_t<decltype(type)>*>(x.data_ptr()) + first;
    perform({x.size(0), 0}, [=](const Sizes& sizes, int threads) {
      normalise_rows(data, sizes.num_tokens, stride, size, weight, static_cast<float>(eps), threads);
    });
  });
}

}  // namespace

MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention_op));
  library.impl("add", TORCH_BOX(&add_op));
  library.impl("normalise", TORCH_BOX(&normalise_op));
}

}  // namespace miniserve
