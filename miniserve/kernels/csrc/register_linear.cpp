// The products of layers and the matrices for them, as torch calls them.

#include "checks.h"

namespace miniserve {
namespace {

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

}  // namespace

MINISERVE_LIBRARY_IMPL(MINISERVE_NAMESPACE, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear_op));
  library.impl("feed_forward", TORCH_BOX(&feed_forward_op));
  library.impl("pack", TORCH_BOX(&pack_op));
  library.impl("unpack_columns", TORCH_BOX(&unpack_columns_op));
  library.impl("linear_quantised", TORCH_BOX(&linear_quantised_op));
  library.impl("pack_grid", TORCH_BOX(&pack_grid_op));
  library.impl("unpack_quantised_columns", TORCH_BOX(&unpack_quantised_columns_op));
}

}  // namespace miniserve
