// The paged KV cache of one layer: where a token's keys and values lie, and how they get there.
//
// It holds 32 tokens of a head as one packed matrix, ready to be the right side of a product: keys as chunks of 32
// dimensions by 32 tokens, values as panels of 32 dimensions, each one chunk of 32 tokens.
//
// A cache of int8 has a scale for each token and head. A key's scale is a factor of its score, a value's of its
// probability, so what is stored is used as it is: as whole numbers, which a bf16 holds exactly.
#pragma once

#include <bit>
#include <limits>
#include <type_traits>

#include "kernels.h"
#include "threads.h"

namespace miniserve {

constexpr int64_t kMostHeadDim = 512;

// What 32 tokens of one head have in the cache, of C: E, or int8_t with the tokens' scales behind.
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
        size_(cache_tile_size(heads.head_dim, std::is_same_v<C, int8_t>)),
        block_size_(block_size) {}

  // The 32 tokens of a request from `first_token` on.
  CacheTile<C> tile(const int64_t* block_table, int64_t first_token, int64_t kv_head) const {
    const int64_t block = block_table[first_token / block_size_];
    const int64_t index = (block * block_size_ + first_token % block_size_) / kChunk;
    C* keys = data_ + (index * num_kv_heads_ + kv_head) * 2 * size_;
    return {keys, keys + size_};
  }

  // [32], one a token, of a tile's keys or values.
  float* scales(int8_t* keys_or_values) const { return reinterpret_cast<float*>(keys_or_values + scales_at_); }

 private:
  C* data_;
  int64_t num_kv_heads_, scales_at_, size_, block_size_;
};

template <class E>
void write_to_cache(const E* key, const E* value, int64_t head_dim, const Cache<E>&, CacheTile<E> tile, int token) {
  for (int64_t d = 0; d < head_dim; d++) {
    const int64_t chunk = d / kChunk * kChunkSize;
    const int within = static_cast<int>(d % kChunk);
    tile.keys[chunk + chunk_offset(key, within, token)] = key[d];
    tile.values[chunk + chunk_offset(value, token, within)] = value[d];
  }
}

// x [size], with room up to whole vectors, becomes whole numbers from -127 to 127; returns their scale. If any is not
// finite, zeros and NaN.
inline float quantise(float* x, int64_t size) {
  const int64_t padded = round_up(size, kLanes);
  std::fill(x + size, x + padded, 0.0f);
  Vec most = zeros(), broken = zeros();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec v = load(x + i);
    most = max(most, max(v, zeros() - v));
    broken = broken + (v - v);
  }
  const float scale = std::max(largest(most), std::numeric_limits<float>::min()) / 127.0f + sum(broken);
  if (scale != scale) {
    std::fill(x, x + padded, 0.0f);
    return scale;
  }
  for (int64_t i = 0; i < padded; i += kLanes) store(x + i, round(load(x + i) / broadcast(scale)));
  return scale;
}

// In the order that a chunk of E has, so that widening goes straight through it.
template <class E>
void write_to_cache(const E* key, const E* value, int64_t head_dim, const Cache<int8_t>& cache, CacheTile<int8_t> tile,
                    int token) {
  float keys[kMostHeadDim], values[kMostHeadDim];
  for (int64_t d = 0; d < head_dim; d++) {
    keys[d] = to_float(key[d]);
    values[d] = to_float(value[d]);
  }
  cache.scales(tile.keys)[token] = quantise(keys, head_dim);
  cache.scales(tile.values)[token] = quantise(values, head_dim);
  for (int64_t d = 0; d < head_dim; d++) {
    const int64_t chunk = d / kChunk * kChunkSize;
    const int within = static_cast<int>(d % kChunk);
    tile.keys[chunk + chunk_offset(key, within, token)] = static_cast<int8_t>(keys[d]);
    tile.values[chunk + chunk_offset(value, token, within)] = static_cast<int8_t>(values[d]);
  }
}

// A chunk's whole numbers as E; exact.
template <class E>
void widen(const int8_t* chunk, E* widened) {
  for (int i = 0; i < kChunkSize; i += kLanes) store(widened + i, load(chunk + i));
}

#if defined(__AVX512VBMI__)

// The lower and the upper byte of the bf16 of 0 to 63.
struct WidenTable {
  alignas(64) uint8_t lower[64] = {}, upper[64] = {};

  constexpr WidenTable() {
    for (int i = 0; i < 64; i++) {
      const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(i));
      lower[i] = static_cast<uint8_t>(bits >> 16);
      upper[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
constexpr WidenTable kWidenTable;

// Twice as fast as by way of 32-bit numbers. From 64 to 127, the bytes are 2x and 0x42.
inline void widen(const int8_t* chunk, bf16* widened) {
  const __m512i lower_table = _mm512_load_si512(kWidenTable.lower), upper_table = _mm512_load_si512(kWidenTable.upper);
  const __m512i upper_of_large = _mm512_set1_epi8(0x42), sign_bit = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i interleaved = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undoes what unpacking does to the order
  for (int i = 0; i < kChunkSize; i += 64) {
    const __m512i x = _mm512_permutexvar_epi64(interleaved, _mm512_loadu_si512(chunk + i));
    const __m512i size = _mm512_abs_epi8(x), twice = _mm512_add_epi8(size, size);
    const __mmask64 is_large = _mm512_movepi8_mask(twice);
    const __m512i lower = _mm512_mask_mov_epi8(_mm512_permutexvar_epi8(size, lower_table), is_large, twice);
    __m512i upper = _mm512_mask_mov_epi8(_mm512_permutexvar_epi8(size, upper_table), is_large, upper_of_large);
    upper = _mm512_or_si512(upper, _mm512_and_si512(x, sign_bit));
    _mm512_storeu_si512(widened + i, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(widened + i + 32, _mm512_unpackhi_epi8(lower, upper));
  }
}

#elif defined(__AVX512BF16__)

// Stores whole cache lines: reading one that consists of two fresh halves would wait.
inline void widen(const int8_t* chunk, bf16* widened) {
  for (int i = 0; i < kChunkSize; i += 2 * kLanes) {
    const __m512bh line = _mm512_cvtne2ps_pbh(load(chunk + i + kLanes).v, load(chunk + i).v);
    std::memcpy(widened + i, &line, sizeof line);
  }
}

#endif

}  // namespace miniserve
