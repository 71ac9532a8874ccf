// The paged KV cache of one layer: where a token's keys and values lie, and how they get there.
//
// It holds 32 tokens of a head as one packed matrix, ready to be the right side of a product: keys as chunks of 32
// dimensions by 32 tokens, values as panels of 32 dimensions, each one chunk of 32 tokens.
//
// A cache of int8 has codes around 128 in the layout of grid.h's groups, and a scale for each token and head: a
// key's scale is a factor of its score, a value's of its probability.
#pragma once

#include <type_traits>

#include "digits.h"
#include "kernels.h"
#include "threads.h"

namespace miniserve {

constexpr int64_t kMostHeadDim = 512;

// What 32 tokens of one head have in the cache, of C: E, or uint8_t with the tokens' scales behind.
template <class C>
struct CacheTile {
  C *keys, *values;
};

template <class C>
class Cache {
 public:
  Cache(C* data, const Heads& heads, int64_t block_size)
      : data_(data),
        num_kv_heads_(heads.num_kv_heads),
        scales_at_(cache_tile_size(heads.head_dim, false)),
        size_(cache_tile_size(heads.head_dim, std::is_same_v<C, uint8_t>)),
        block_size_(block_size) {}

  // The 32 tokens of a request from `first_token` on.
  CacheTile<C> tile(const int64_t* block_table, int64_t first_token, int64_t kv_head) const {
    const int64_t block = block_table[first_token / block_size_];
    const int64_t index = (block * block_size_ + first_token % block_size_) / kChunk;
    C* keys = data_ + (index * num_kv_heads_ + kv_head) * 2 * size_;
    return {keys, keys + size_};
  }

  // [32], one a token, of a tile's keys or values.
  float* scales(uint8_t* keys_or_values) const { return reinterpret_cast<float*>(keys_or_values + scales_at_); }

 private:
  C* data_;
  int64_t num_kv_heads_, scales_at_, size_, block_size_;
};

inline int num_panels(int64_t head_dim) { return static_cast<int>(round_up(head_dim, kChunk) / kChunk); }

// A token's elements of a panel: its key is a column of the chunk, its value a row. Only they are touched: their
// neighbours are another thread's, perhaps.
template <class E>
inline void write_key(const E* key, int count, E* chunk, int token) {
  for (int d = 0; d < count; d++) chunk[chunk_offset(key, d, token)] = key[d];
}

template <class E>
inline void write_value(const E* value, int count, E* chunk, int token) {
  for (int d = 0; d < count; d++) chunk[chunk_offset(value, token, d)] = value[d];
}

// The same for a whole panel of bf16, in pairs and in vectors.
inline void write_whole_key(const bf16* key, bf16* chunk, int token) {
  for (int d = 0; d < kChunk; d += 2) std::memcpy(chunk + chunk_offset(key, d, token), key + d, 2 * sizeof(bf16));
}

inline void write_whole_value(const bf16* value, bf16* chunk, int token) {
  for (int d = 0; d < kChunk; d += kLanes) {
    store_to_pairs(chunk + chunk_offset(value, token / 2 * 2, d), token % 2, value + d);
  }
}

inline void write_whole_key(const float* key, float* chunk, int token) { write_key(key, kChunk, chunk, token); }
inline void write_whole_value(const float* value, float* chunk, int token) { write_value(value, kChunk, chunk, token); }

template <class E>
void write_to_cache(const E* key, const E* value, int64_t head_dim, const Cache<E>&, CacheTile<E> tile, int token) {
  for (int64_t first = 0; first < head_dim; first += kChunk) {
    E *keys = tile.keys + first * kChunk, *values = tile.values + first * kChunk;
    if (first + kChunk <= head_dim) {
      write_whole_key(key + first, keys, token);
      write_whole_value(value + first, values, token);
    } else {
      const int count = static_cast<int>(head_dim - first);
      write_key(key + first, count, keys, token);
      write_value(value + first, count, values, token);
    }
  }
}

// As codes; returns their scale.
template <class E>
inline float quantise(const E* x, int64_t size, uint8_t* codes) {
  alignas(64) float whole[kMostHeadDim];
  const int64_t padded = round_up(size, kLanes);
  load_row(x, size, whole);
  std::fill(whole + size, whole + padded, 0.0f);
  const float scale = make_whole<1>(whole, padded);
  for (int64_t d = 0; d < size; d++) codes[d] = static_cast<uint8_t>(static_cast<int>(whole[d]) + 128);
  return scale;
}

template <class E>
void write_to_cache(const E* key, const E* value, int64_t head_dim, const Cache<uint8_t>& cache,
                    CacheTile<uint8_t> tile, int token) {
  uint8_t keys[kMostHeadDim], values[kMostHeadDim];
  cache.scales(tile.keys)[token] = quantise(key, head_dim, keys);
  cache.scales(tile.values)[token] = quantise(value, head_dim, values);
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    uint8_t* of_key = tile.keys + d / kChunk * kChunkSize;
    uint8_t* of_value = tile.values + d / kChunk * kChunkSize;
    const int within = static_cast<int>(d % kChunk);
    for (int i = 0; i < kLanes; i += 4) std::memcpy(of_key + group_code_offset(within + i, token), keys + d + i, 4);
    store_to_quads(of_value + group_code_offset(token / 4 * 4, within), token % 4, values + d);
  }
  for (; d < head_dim; d++) {
    const int64_t chunk = d / kChunk * kChunkSize;
    const int within = static_cast<int>(d % kChunk);
    tile.keys[chunk + group_code_offset(within, token)] = keys[d];
    tile.values[chunk + group_code_offset(token, within)] = values[d];
  }
}

}  // namespace miniserve
