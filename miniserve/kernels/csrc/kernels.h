// What the operators compute, in plain C++; `register_*.cpp` give them to torch. Arrays are dense, the last dimension
// next to each other. E is the type of weights, activations and the KV cache: bf16 or float.
#pragma once

#include "tile.h"

namespace miniserve {

// What is done with the product of a linear layer.
enum class Epilogue {
  kStore,     // out = y
  kAdd,       // out += y; out is the residual stream
  kGate,      // out = activation(gate) x up, gate and up being alternate groups of 16 columns of y
  kGateTiles  // the same as row tiles of E: the left side of another product
};

// What a gate does to the element beside it (see layers/mlp.py).
enum class Activation { kSilu, kGeluTanh, kClampedSwiglu };

// Input rows: [num_rows][size] of float (the residual stream) or E. With `norm`, each row is first divided by its root
// mean square and multiplied by norm [size].
struct Rows {
  const void* data;
  bool is_float;
  int64_t count, size;
  const float* norm;  // may be null
  float eps;

  Rows first(int64_t num_rows) const { return {data, is_float, num_rows, size, norm, eps}; }
};

// A packed matrix [columns][size]: panels of 32 columns, each [chunks of 32 k]. Both are padded to multiples of 32.
template <class E>
struct Weight {
  const E* data;
  int64_t columns, size;
  const float* bias;  // [columns], padded like the data; may be null
};

// How a quantised matrix [columns][size] is kept: an element is scale x (code - zero), or scale x code + offset.
//
// With whole rows, a column has one scale, and codes have 8 bits; else each group of 32 k of a column has its own scale,
// and codes have 8 or 4 bits. Zero is 128 or 8. See grid.h for the layout.
struct Grid {
  int64_t columns, size;
  int bits;
  bool whole_rows, has_offsets;
};

// Bytes of a packed matrix.
int64_t grid_bytes(const Grid& grid);

struct QuantisedWeight {
  Grid grid;
  const uint8_t* data;
  const float* scales;  // [columns] of whole rows, padded to a multiple of 32; otherwise null
  const float* bias;    // [columns], padded likewise; may be null
};

struct Output {
  void* data;  // [num_rows][columns], half as many columns for a gate
  bool is_float;
  Epilogue epilogue;
  Activation activation = Activation::kSilu;
};

template <class E>
void linear(const Rows& rows, const Weight<E>& weight, const Output& out, int num_threads);

// out [num_rows][size] float += down(activation(gate) x up), gate and up being products of the rows, which out may hold.
// What lies between both products stays in the caches.
template <class E>
void feed_forward(const Rows& rows, const Weight<E>& gate_up, const Weight<E>& down, Activation activation, float* out,
                  int num_threads);

// out [num_rows][size] float += scale x the rows, normalised if they have a norm.
template <class E>
void add_rows(const Rows& rows, float scale, float* out, int num_threads);

// Normalises `count` rows of E in place; each begins `stride` elements behind the one before.
template <class E>
void normalise_rows(E* x, int64_t count, int64_t stride, int64_t size, const float* norm, float eps, int num_threads);

// As `linear`, with a quantised matrix. Rows become whole numbers of `num_digits` (1 or 2) digits of 7 bits times a scale.
template <class E>
void linear_quantised(const Rows& rows, const QuantisedWeight& weight, int num_digits, const Output& out,
                      int num_threads);

// `weight` [columns][size] into the layout of `Weight`, padded with zeros.
template <class E>
void pack(const E* weight, int64_t columns, int64_t size, E* packed, int num_threads);

// codes [columns][size] into the layout of a quantised matrix, with scales and offsets [columns][groups] as IEEE halves;
// both are null for whole rows, offsets if the grid has none.
void pack_grid(const Grid& grid, const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, uint8_t* packed,
               int num_threads);

// Columns `ids` of a packed matrix, that is rows of the plain one, times `scale`: out [num_ids][size] float.
template <class E>
void unpack_columns(const E* packed, int64_t size, const int64_t* ids, int64_t num_ids, float scale, float* out,
                    int num_threads);

void unpack_quantised_columns(const QuantisedWeight& weight, const int64_t* ids, int64_t num_ids, float scale,
                              float* out, int num_threads);

// The heads of one layer, and what is done to queries and keys before attention.
struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;
  const float* rope;  // [positions][2][rotary_dim], cos and sin; null: no rotation
  int64_t rotary_dim;
  const float *q_norm, *k_norm;  // [head_dim], may be null
  float eps;
  float scale;     // of the scores
  float soft_cap;  // 0: none; else scores become soft_cap tanh(score / soft_cap)
  int64_t window;  // 0: none; else a query sees this many tokens, its own included
  const float* sinks;  // [num_heads], may be null: a score of each head that takes part in the softmax without a value
};

// Where the tokens of one step live. Request i has the new tokens query_start[i] to query_start[i + 1].
struct Step {
  int64_t num_tokens, num_requests, max_blocks;
  const int32_t* query_start;   // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests], new tokens included
  const int64_t* block_tables;  // [num_requests][max_blocks]

  // The first tokens and requests of it.
  Step first(int64_t tokens, int64_t requests) const {
    return {tokens, requests, max_blocks, query_start, seq_lens, block_tables};
  }
};

// Normalises and rotates queries and keys in place, writes keys and values to the cache, and attends.
//
// qkv [num_tokens][q | k | v heads][head_dim]; cache [num_blocks][block_size / 32][num_kv_heads][keys, values] of 32
// tokens each (see kv_cache.h), of E or uint8_t; out [num_tokens][num_heads][head_dim].
template <class E, class C>
void attention(E* qkv, const Heads& heads, const Step& step, C* cache, int64_t block_size, E* out, int num_threads);

// The scales of 32 tokens. As floats they are exact, and 3 to 6 percent of the tokens.
constexpr int64_t kScaleBytes = kChunk * sizeof(float);

// Elements that the keys, or the values, of 32 tokens of one head take in the cache; of int8, with their scales.
inline int64_t cache_tile_size(int64_t head_dim, bool is_quantised) {
  return (head_dim + kChunk - 1) / kChunk * kChunkSize + (is_quantised ? kScaleBytes : 0);
}

// Rows of logits [num_rows][size] to out [num_rows][size], with -inf where masks [num_rows][words of 32 elements] have no
// bit: bit i % 32 of word i / 32 is that of element i. What stands in its place is not looked at.
void forbid(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const uint32_t* masks, float* out,
            int num_threads);

// The first largest of each row of logits [num_rows][size], and its index. A row with NaN has the value NaN.
void largest_of_rows(const float* logits, int64_t num_rows, int64_t size, int64_t stride, int64_t* ids, float* values,
                     int num_threads);

// Of each row of logits [num_rows][size]: the rank of token `ids[row]`, which is one more than the number of larger
// logits; then log-probabilities [1 + num_top], of that token and of the first `num_top` <= size, whose ids follow. Those
// of a row without probabilities, which has NaN or +inf or nothing but -inf, are NaN.
void token_logprobs(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const int64_t* ids,
                    int64_t num_top, int32_t* ranks, float* logprobs, int32_t* top_ids, int num_threads);

// How the token of one row is drawn. The filters come in this order, and the most probable token always stays.
struct Draw {
  float temperature;  // 0: not drawn, the most probable one stays
  int64_t top_k;      // 0: all
  float top_p;        // the probable ones that reach this together, counted after top_k; 1: all
  float min_p;        // those of at least this times the largest probability
  uint64_t seed;      // of the row's noise
};

// ids [num_rows] holds the first largest of each row of logits [num_rows][size], and then the token that was drawn.
void draw(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const Draw* draws, int64_t* ids,
          int num_threads);

}  // namespace miniserve
