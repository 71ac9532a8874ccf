// What is done to a step's heads before attention: norms, RoPE, and keys and values into the cache.
#pragma once

#include "kernels.h"
#include "kv_cache.h"
#include "threads.h"

namespace miniserve {

inline void normalise_head(float* x, int64_t size, const float* norm, float eps) {
  const int64_t in_vectors = size / kLanes * kLanes;
  Vec lanes = zeros();
  for (int64_t i = 0; i < in_vectors; i += kLanes) lanes = fma(load(x + i), load(x + i), lanes);
  float squares = sum(lanes);
  for (int64_t i = in_vectors; i < size; i++) squares += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i++) x[i] = x[i] * inverse * norm[i];
}

// Dimensions i and i + rotary_dim / 2 are a pair; the table has the sine's sign (see layers/rotary.py).
inline void rotate(float* x, int64_t rotary_dim, const float* table, int64_t position) {
  const float* cos = table + position * 2 * rotary_dim;
  const float* sin = cos + rotary_dim;
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + i + half);
    store(x + i, a * load(cos + i) + b * load(sin + i));
    store(x + i + half, b * load(cos + i + half) + a * load(sin + i + half));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

template <class E>
void prepare_head(E* head, const Heads& heads, const float* norm, int64_t position) {
  float x[kMostHeadDim];
  load_row(head, heads.head_dim, x);
  if (norm) normalise_head(x, heads.head_dim, norm, heads.eps);
  if (heads.rope) rotate(x, heads.rotary_dim, heads.rope, position);
  store_row(x, heads.head_dim, head);
}

// Prepares a share of the step's heads: queries in place, keys in place and, with their values, into the cache.
template <class E, class C>
void prepare_heads(E* qkv, const Heads& heads, const Step& step, const Cache<C>& cache, Range own) {
  const int64_t rotated = heads.num_heads + heads.num_kv_heads;
  const int64_t token_size = (rotated + heads.num_kv_heads) * heads.head_dim;
  int64_t request = 0;
  int64_t token = own.begin / rotated, head = own.begin % rotated - 1;
  for (int64_t i = own.begin; i < own.end; i++) {
    if (++head == rotated) {
      head = 0;
      token++;
    }
    while (token >= step.query_start[request + 1]) request++;
    const int64_t position = step.seq_lens[request] - step.query_start[request + 1] + token;
    E* x = qkv + token * token_size + head * heads.head_dim;
    const bool is_query = head < heads.num_heads;
    prepare_head(x, heads, is_query ? heads.q_norm : heads.k_norm, position);
    if (is_query) continue;
    const int64_t* table = step.block_tables + request * step.max_blocks;
    const CacheTile<C> tile = cache.tile(table, position / kChunk * kChunk, head - heads.num_heads);
    const E* value = x + heads.num_kv_heads * heads.head_dim;
    write_to_cache(x, value, heads.head_dim, cache, tile, static_cast<int>(position % kChunk));
  }
}

}  // namespace miniserve
