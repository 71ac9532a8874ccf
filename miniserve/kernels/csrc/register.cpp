// The operators' names and schemas in torch, and the checks between tensors and the plain C++ of `kernels.h`.
//
// One library a build; each build has a namespace of its own (MINISERVE_NAMESPACE), so that several can be loaded.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "kernels.h"
#include "recording.h"

namespace miniserve {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Calls call(sizes, num_threads) now, or keeps it for replays. It holds pointers, and no tensors.
template <class F>
void perform(const Sizes& sizes, const F& call) {
  is_recording() ? keep(sizes, call) : call(sizes, num_threads());
}

void check(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dims) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected ", torch::headeronly::toString(dtype), ", got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == dims, name, ": expected ", dims, " dimensions, got ", tensor.dim());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected to be contiguous");
}

const float* optional_floats(const std::optional<Tensor>& tensor, const char* name, int64_t size) {
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

Epilogue epilogue_of(const std::string& name) {
  if (name == "store") return Epilogue::kStore;
  if (name == "add") return Epilogue::kAdd;
  STD_TORCH_CHECK(name == "gate", "epilogue: expected store, add or gate, got ", name);
  return Epilogue::kGate;
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  STD_TORCH_CHECK(name == "clamped_swiglu", "activation: expected silu, gelu_tanh or clamped_swiglu, got ", name);
  return Activation::kClampedSwiglu;
}

void check_packed(const Tensor& packed, int64_t columns, int64_t size, const char* name = "packed") {
  check(packed, name, packed.scalar_type(), 1);
  const int64_t padded = (columns + kChunk - 1) / kChunk * kChunk * ((size + kChunk - 1) / kChunk * kChunk);
  STD_TORCH_CHECK(packed.numel() >= padded, name, ": a matrix of ", columns, " by ", size, " takes ", padded,
                  " elements, got ", packed.numel());
}

// What a linear layer does, but for its matrix: rows in `dtype` or float, and where the product goes.
struct Call {
  Rows rows;
  Output out;
};

Call call_of(const Tensor& x, int64_t columns, const std::optional<Tensor>& norm, double eps,
             const std::string& epilogue, const std::string& activation, ScalarType dtype, const Tensor& out) {
  const bool is_float = x.scalar_type() == ScalarType::Float;
  check(x, "x", is_float ? ScalarType::Float : dtype, 2);
  const bool out_is_float = out.scalar_type() == ScalarType::Float;
  check(out, "out", out_is_float ? ScalarType::Float : dtype, 2);
  const Epilogue kind = epilogue_of(epilogue);
  const bool gate = kind == Epilogue::kGate;
  STD_TORCH_CHECK(kind == Epilogue::kStore || out_is_float == (kind == Epilogue::kAdd || dtype == ScalarType::Float),
                  "out: expected float32 to add to, and the layer's dtype behind a gate");
  STD_TORCH_CHECK(out.size(0) == x.size(0) && out.size(1) == (gate ? columns / 2 : columns), "out: of ", out.size(0),
                  " by ", out.size(1), ", which does not fit ", x.size(0), " rows and ", columns, " columns");
  const Rows rows{x.data_ptr(), is_float, x.size(0), x.size(1), optional_floats(norm, "norm", x.size(1)),
                  static_cast<float>(eps)};
  return {rows, {out.data_ptr(), out_is_float, kind, activation_of(activation)}};
}

int64_t whole_panels(int64_t columns) { return (columns + kChunk - 1) / kChunk * kChunk; }

void linear_op(const Tensor& x, const Tensor& packed, int64_t columns, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& norm, double eps, const std::string& epilogue,
               const std::string& activation, const Tensor& out) {
  const ScalarType dtype = packed.scalar_type();
  const Call call = call_of(x, columns, norm, eps, epilogue, activation, dtype, out);
  check_packed(packed, columns, x.size(1));
  const float* bias_data = optional_floats(bias, "bias", whole_panels(columns));
  for_dtype(dtype, "packed", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const Weight<E> weight{static_cast<const E*>(packed.data_ptr()), columns, x.size(1), bias_data};
    perform({x.size(0), 0}, [=](const Sizes& sizes, int threads) {
      linear(call.rows.first(sizes.num_tokens), weight, call.out, threads);
    });
  });
}

void feed_forward_op(const Tensor& residual, const Tensor& gate_up, const std::optional<Tensor>& gate_up_bias,
                     const Tensor& down, const std::optional<Tensor>& down_bias, int64_t intermediate,
                     const std::optional<Tensor>& norm, double eps, const std::string& activation) {
  check(residual, "residual", ScalarType::Float, 2);
  const int64_t size = residual.size(1);
  check_packed(gate_up, 2 * intermediate, size, "gate_up");
  check_packed(down, size, intermediate, "down");
  const ScalarType dtype = gate_up.scalar_type();
  check(down, "down", dtype, 1);
  const float* gate_up_bias_data = optional_floats(gate_up_bias, "gate_up_bias", whole_panels(2 * intermediate));
  const float* down_bias_data = optional_floats(down_bias, "down_bias", whole_panels(size));
  auto* data = static_cast<float*>(residual.data_ptr());
  const Rows rows{data, true, residual.size(0), size, optional_floats(norm, "norm", size), static_cast<float>(eps)};
  for_dtype(dtype, "gate_up", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const Weight<E> first{static_cast<const E*>(gate_up.data_ptr()), 2 * intermediate, size, gate_up_bias_data};
    const Weight<E> second{static_cast<const E*>(down.data_ptr()), size, intermediate, down_bias_data};
    perform({rows.count, 0}, [=, gate = activation_of(activation)](const Sizes& sizes, int threads) {
      feed_forward(rows.first(sizes.num_tokens), first, second, gate, data, threads);
    });
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

void pack_op(const Tensor& weight, const Tensor& packed) {
  check(weight, "weight", packed.scalar_type(), 2);
  check_packed(packed, weight.size(0), weight.size(1));
  for_dtype(weight.scalar_type(), "weight", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    pack(static_cast<const E*>(weight.data_ptr()), weight.size(0), weight.size(1), static_cast<E*>(packed.data_ptr()),
         num_threads());
  });
}

void check_ids(const int64_t* ids, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; i++) {
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < limit, "ids: ", ids[i], " is not below ", limit);
  }
}

// Ids of columns, and where these go.
const int64_t* ids_of(const Tensor& ids, const Tensor& out) {
  check(ids, "ids", ScalarType::Long, 1);
  check(out, "out", ScalarType::Float, 2);
  STD_TORCH_CHECK(out.size(0) == ids.size(0), "out: has ", out.size(0), " rows for ", ids.size(0), " ids");
  return static_cast<const int64_t*>(ids.data_ptr());
}

void unpack_columns_op(const Tensor& packed, int64_t columns, const Tensor& ids, double scale, const Tensor& out) {
  const int64_t* id_data = ids_of(ids, out);
  check_packed(packed, columns, out.size(1));
  for_dtype(packed.scalar_type(), "packed", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const auto* data = static_cast<const E*>(packed.data_ptr());
    auto* out_data = static_cast<float*>(out.data_ptr());
    perform({ids.size(0), 0}, [=, size = out.size(1)](const Sizes& sizes, int threads) {
      check_ids(id_data, sizes.num_tokens, columns);
      unpack_columns(data, size, id_data, sizes.num_tokens, static_cast<float>(scale), out_data, threads);
    });
  });
}

Grid grid_of(int64_t columns, int64_t size, int64_t bits, bool whole_rows, bool has_offsets) {
  STD_TORCH_CHECK(bits == 8 || (bits == 4 && !whole_rows), "bits: expected 8, or 4 in groups, got ", bits);
  STD_TORCH_CHECK(!(whole_rows && has_offsets), "offsets: only groups have any");
  return {columns, size, static_cast<int>(bits), whole_rows, has_offsets};
}

QuantisedWeight quantised_of(const Tensor& packed, const std::optional<Tensor>& scales, int64_t columns, int64_t size,
                             int64_t bits, bool has_offsets, const std::optional<Tensor>& bias) {
  const Grid grid = grid_of(columns, size, bits, scales.has_value(), has_offsets);
  check(packed, "packed", ScalarType::Byte, 1);
  STD_TORCH_CHECK(packed.numel() >= grid_bytes(grid), "packed: takes ", grid_bytes(grid), " bytes, got ",
                  packed.numel());
  return {grid, static_cast<const uint8_t*>(packed.data_ptr()),
          optional_floats(scales, "scales", whole_panels(columns)), optional_floats(bias, "bias", whole_panels(columns))};
}

// The type of rows and results that are not float is the other one's; with both float it is float.
void linear_quantised_op(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales, int64_t columns,
                         int64_t bits, bool has_offsets, int64_t num_digits, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& norm, double eps, const std::string& epilogue,
                         const std::string& activation, const Tensor& out) {
  const ScalarType dtype = x.scalar_type() == ScalarType::Float ? out.scalar_type() : x.scalar_type();
  const Call call = call_of(x, columns, norm, eps, epilogue, activation, dtype, out);
  const QuantisedWeight weight = quantised_of(packed, scales, columns, x.size(1), bits, has_offsets, bias);
  STD_TORCH_CHECK(num_digits == 1 || num_digits == 2, "num_digits: expected 1 or 2, got ", num_digits);
  for_dtype(dtype, "x", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    perform({x.size(0), 0}, [=, digits = static_cast<int>(num_digits)](const Sizes& sizes, int threads) {
      linear_quantised<E>(call.rows.first(sizes.num_tokens), weight, digits, call.out, threads);
    });
  });
}

// IEEE halves [columns][groups], or null.
const uint16_t* optional_halves(const std::optional<Tensor>& tensor, const char* name, int64_t columns, int64_t groups) {
  if (!tensor) return nullptr;
  check(*tensor, name, ScalarType::Half, 2);
  STD_TORCH_CHECK(tensor->size(0) == columns && tensor->size(1) == groups, name, ": expected ", columns, " by ", groups);
  return static_cast<const uint16_t*>(tensor->data_ptr());
}

void pack_grid_op(const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& offsets,
                  int64_t bits, const Tensor& packed) {
  check(codes, "codes", ScalarType::Byte, 2);
  const Grid grid = grid_of(codes.size(0), codes.size(1), bits, !scales.has_value(), offsets.has_value());
  check(packed, "packed", ScalarType::Byte, 1);
  STD_TORCH_CHECK(packed.numel() >= grid_bytes(grid), "packed: takes ", grid_bytes(grid), " bytes, got ",
                  packed.numel());
  const int64_t groups = (grid.size + 31) / 32;
  pack_grid(grid, static_cast<const uint8_t*>(codes.data_ptr()),
            optional_halves(scales, "scales", grid.columns, groups),
            optional_halves(offsets, "offsets", grid.columns, groups), static_cast<uint8_t*>(packed.data_ptr()),
            num_threads());
}

void unpack_quantised_columns_op(const Tensor& packed, const std::optional<Tensor>& scales, int64_t columns,
                                 int64_t bits, bool has_offsets, const Tensor& ids, double scale, const Tensor& out) {
  const int64_t* id_data = ids_of(ids, out);
  const QuantisedWeight weight = quantised_of(packed, scales, columns, out.size(1), bits, has_offsets, {});
  auto* out_data = static_cast<float*>(out.data_ptr());
  perform({ids.size(0), 0}, [=](const Sizes& sizes, int threads) {
    check_ids(id_data, sizes.num_tokens, columns);
    unpack_quantised_columns(weight, id_data, sizes.num_tokens, static_cast<float>(scale), out_data, threads);
  });
}

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

void attention_op(const Tensor& qkv, int64_t num_kv_heads, const std::optional<Tensor>& rope,
                  const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps, double scale,
                  double soft_cap, int64_t window, const std::optional<Tensor>& sinks, const Tensor& cache, const Tensor& query_start,
                  const Tensor& seq_lens, const Tensor& block_tables, const Tensor& out) {
  const ScalarType dtype = qkv.scalar_type();
  check(qkv, "qkv", dtype, 3);
  check(out, "out", dtype, 3);
  const bool is_quantised = cache.scalar_type() == ScalarType::Char;
  check(cache, "cache", is_quantised ? ScalarType::Char : dtype, 5);
  const int64_t num_heads = qkv.size(1) - 2 * num_kv_heads, head_dim = qkv.size(2);
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, num_heads, " query heads for ",
                  num_kv_heads, " key heads");
  STD_TORCH_CHECK(head_dim <= 512, "head_dim: at most 512, got ", head_dim);
  STD_TORCH_CHECK(out.size(0) == qkv.size(0) && out.size(1) == num_heads && out.size(2) == head_dim,
                  "out does not fit qkv");
  STD_TORCH_CHECK(cache.size(1) > 0 && cache.size(2) == num_kv_heads && cache.size(3) == 2 &&
                      cache.size(4) == cache_tile_size(head_dim, is_quantised),
                  "cache does not fit ", num_kv_heads, " heads of ", head_dim);
  const Step step = step_of(query_start, seq_lens, block_tables, qkv.size(0));
  Heads heads{};
  heads.num_heads = num_heads;
  heads.num_kv_heads = num_kv_heads;
  heads.head_dim = head_dim;
  if (rope) {
    check(*rope, "rope", ScalarType::Float, 3);
    heads.rope = static_cast<const float*>(rope->data_ptr());
    heads.rotary_dim = rope->size(2);
    STD_TORCH_CHECK(rope->size(1) == 2 && heads.rotary_dim <= head_dim && heads.rotary_dim % 2 == 0,
                    "rope: expected [positions, 2, rotary_dim]");
  }
  heads.q_norm = optional_floats(q_norm, "q_norm", head_dim);
  heads.k_norm = optional_floats(k_norm, "k_norm", head_dim);
  heads.eps = static_cast<float>(eps);
  heads.scale = static_cast<float>(scale);
  heads.soft_cap = static_cast<float>(soft_cap);
  heads.window = window;
  heads.sinks = optional_floats(sinks, "sinks", num_heads);
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

void begin_recording_op(int64_t num_tokens, int64_t num_requests) { begin_recording({num_tokens, num_requests}); }
int64_t end_recording_op() { return end_recording(); }
void replay_op(int64_t recording, int64_t num_tokens, int64_t num_requests) {
  replay(recording, {num_tokens, num_requests}, num_threads());
}
void forget_op(int64_t recording) { forget(recording); }

}  // namespace

// The macros take their first argument as it is written; this one lets the namespace's macro be replaced before.
#define MINISERVE_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define MINISERVE_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

MINISERVE_LIBRARY(MINISERVE_NAMESPACE, library) {
  library.def(
      "linear(Tensor x, Tensor packed, int columns, Tensor? bias, Tensor? norm, float eps, str epilogue, "
      "str activation, Tensor(a!) out) -> ()");
  library.def(
      "feed_forward(Tensor(a!) residual, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
      "int intermediate, Tensor? norm, float eps, str activation) -> ()");
  library.def("add(Tensor(a!) residual, Tensor x, Tensor? norm, float eps, float scale) -> ()");
  library.def("normalise(Tensor(a!) x, int first, Tensor norm, float eps) -> ()");
  library.def("pack(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("unpack_columns(Tensor packed, int columns, Tensor ids, float scale, Tensor(a!) out) -> ()");
  library.def(
      "linear_quantised(Tensor x, Tensor packed, Tensor? scales, int columns, int bits, bool has_offsets, "
      "int num_digits, Tensor? bias, Tensor? norm, float eps, str epilogue, str activation, Tensor(a!) out) -> ()");
  library.def("pack_grid(Tensor codes, Tensor? scales, Tensor? offsets, int bits, Tensor(a!) packed) -> ()");
  library.def(
      "unpack_quantised_columns(Tensor packed, Tensor? scales, int columns, int bits, bool has_offsets, Tensor ids, "
      "float scale, Tensor(a!) out) -> ()");
  library.def(
      "attention(Tensor(a!) qkv, int num_kv_heads, Tensor? rope, Tensor? q_norm, Tensor? k_norm, float eps, "
      "float scale, float soft_cap, int window, Tensor? sinks, Tensor(b!) cache, Tensor query_start, "
      "Tensor seq_lens, Tensor block_tables, Tensor(c!) out) -> ()");
  library.def("forbid(Tensor logits, Tensor masks, Tensor(a!) out) -> ()");
  library.def("largest_of_rows(Tensor logits, Tensor(a!) ids, Tensor(b!) values) -> ()");
  library.def(
      "token_logprobs(Tensor logits, Tensor ids, Tensor(a!) ranks, Tensor(b!) logprobs, Tensor(c!) top_ids) -> ()");
  library.def(
      "draw(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor(a!) ids) -> ()");
  library.def("begin_recording(int num_tokens, int num_requests) -> ()");
  library.def("end_recording() -> int");
  library.def("replay(int recording, int num_tokens, int num_requests) -> ()");
  library.def("forget(int recording) -> ()");
}

MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear_op));
  library.impl("feed_forward", TORCH_BOX(&feed_forward_op));
  library.impl("add", TORCH_BOX(&add_op));
  library.impl("normalise", TORCH_BOX(&normalise_op));
  library.impl("pack", TORCH_BOX(&pack_op));
  library.impl("unpack_columns", TORCH_BOX(&unpack_columns_op));
  library.impl("linear_quantised", TORCH_BOX(&linear_quantised_op));
  library.impl("pack_grid", TORCH_BOX(&pack_grid_op));
  library.impl("unpack_quantised_columns", TORCH_BOX(&unpack_quantised_columns_op));
  library.impl("attention", TORCH_BOX(&attention_op));
  library.impl("forbid", TORCH_BOX(&forbid_op));
  library.impl("largest_of_rows", TORCH_BOX(&largest_of_rows_op));
  library.impl("token_logprobs", TORCH_BOX(&token_logprobs_op));
  library.impl("draw", TORCH_BOX(&draw_op));
}

// Without a tensor there is nothing that would choose the CPU.
MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CompositeExplicitAutograd, library) {
  library.impl("begin_recording", TORCH_BOX(&begin_recording_op));
  library.impl("end_recording", TORCH_BOX(&end_recording_op));
  library.impl("replay", TORCH_BOX(&replay_op));
  library.impl("forget", TORCH_BOX(&forget_op));
}

}  // namespace miniserve
