// Products of small tiles: what every matrix product of the kernels is made of.
//
// Whatever stands on the right of a product, weights as well as cached keys and values, is kept in chunks of 32 k by 32
// columns; what stands on the left is laid out in row tiles of 16 rows by 32 k. An element of the result is summed over
// k in one order, however many rows are computed together: that is why an answer is the same alone and in a batch.
//
//   row tile      [16 rows][32 k]
//   bf16 chunk    [2 halves][16 pairs of k][16 columns][2]     the layout of an AMX tile; pairs suit AVX-512 as well
//   float chunk   [32 k][32 columns]
#pragma once

#include "vec.h"

namespace miniserve {

constexpr int kTileRows = 16;
constexpr int kChunk = 32;
constexpr int kRowTileSize = kTileRows * kChunk;
constexpr int kChunkSize = kChunk * kChunk;

// Where element (k, column) lies in a chunk.
inline int chunk_offset(const bf16*, int k, int column) {
  return (column / 16) * (kChunkSize / 2) + (k / 2) * 32 + (column % 16) * 2 + k % 2;
}
inline int chunk_offset(const float*, int k, int column) { return k * kChunk + column; }

// Into the second-level cache. Harmless where there is no such address.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// What a product fetches meanwhile for a later one: of each chunk, some of the cache lines that lie `ahead` bytes behind.
struct Fetch {
  int64_t ahead;
  int first_line, last_line;

  // The first (0) or second (1) part of it, for a chunk.
  void half(const void* chunk, int which) const {
    const int middle = (first_line + last_line) / 2;
    const char* start = static_cast<const char*>(chunk) + ahead;
    const int end = which == 0 ? middle : last_line;
    for (int line = which == 0 ? first_line : middle; line < end; line++) prefetch(start + line * 64);
  }
};

// How far ahead of their use weights are fetched while a few rows are multiplied. Many rows fetch the next panel.
constexpr int64_t kFetchedAhead = 2048;

// Rows that are multiplied by a panel one after the other: as many as stay in the second-level cache beside it.
constexpr int64_t kBlockRows = 256;

// Nothing.
constexpr Fetch kNoFetch{0, 0, 0};

template <class E>
constexpr int kChunkLines = kChunkSize * sizeof(E) / 64;

// Whether products of E have a unit of their own, beside which vectors are free to do something else.
template <class E>
constexpr bool kHasTiles = false;

#if defined(__AMX_BF16__)

template <>
inline constexpr bool kHasTiles<bf16> = true;

// gcc 12's own _tile_loadd and _tile_loadconfig do not say what they read: what was written there before may come too late,
// or never.
#define MINISERVE_TILE_READ(instruction, tile, from, stride) \
  asm volatile(instruction " (%0,%1,1), %%tmm" #tile ::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define MINISERVE_TILE_LOAD(tile, from, stride) MINISERVE_TILE_READ("tileloadd", tile, from, stride)
#define MINISERVE_TILE_STREAM(tile, from, stride) MINISERVE_TILE_READ("tileloaddt1", tile, from, stride)

// The processor's tile registers, set up for products of `rows` rows of `bytes` each: 64, or 32 where a product has only
// 32 k of one byte. Given back at the end of the scope. Must live on the thread that multiplies.
class TileRegisters {
 public:
  explicit TileRegisters(int rows, int bytes = 64) : bytes_(bytes) { resize(rows); }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  void resize(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    constexpr int first_left = 4, first_right = 6;  // 0 to 3 are sums, 4 and 5 left sides, 6 and 7 right sides
    for (int tile = 0; tile < 8; tile++) {
      const bool is_left = tile >= first_left && tile < first_right;
      config.bytes_per_row[tile] = static_cast<uint16_t>(is_left ? bytes_ : 64);
      config.rows[tile] = static_cast<uint8_t>(tile < first_right ? rows : bytes_ / 4);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

 private:
  int bytes_, rows_ = 0;
};

// sums [rows][32], `stride` floats apart = sum over i of left[i] right(i), for i < num_chunks. Twice for each chunk, what is
// to be done meanwhile is done: meanwhile.half(chunk, 0 or 1).
template <class Right, class Meanwhile>
inline void multiply(const bf16* left, int, int num_chunks, Right right, const Meanwhile& meanwhile, float* sums,
                     int64_t stride) {
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i < num_chunks; i++) {
    const bf16* chunk = right(i);
    MINISERVE_TILE_LOAD(4, left + i * kRowTileSize, 64);
    MINISERVE_TILE_LOAD(6, chunk, 64);
    meanwhile.half(chunk, 0);
    _tile_dpbf16ps(0, 4, 6);
    MINISERVE_TILE_LOAD(7, chunk + kChunkSize / 2, 64);
    meanwhile.half(chunk, 1);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16, stride * 4);
}

// The same for two row tiles that share the right side, which stays in the first-level cache: each left side is needed
// only once in a panel.
template <class Right, class Meanwhile>
inline void multiply_two(const bf16* left, const bf16* left2, int num_chunks, Right right, const Meanwhile& meanwhile,
                         float* sums, float* sums2) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < num_chunks; i++) {
    const bf16* chunk = right(i);
    MINISERVE_TILE_STREAM(4, left + i * kRowTileSize, 64);
    MINISERVE_TILE_LOAD(6, chunk, 64);
    _tile_dpbf16ps(0, 4, 6);
    MINISERVE_TILE_LOAD(7, chunk + kChunkSize / 2, 64);
    meanwhile.half(chunk, 0);
    _tile_dpbf16ps(1, 4, 7);
    MINISERVE_TILE_STREAM(5, left2 + i * kRowTileSize, 64);
    _tile_dpbf16ps(2, 5, 6);
    meanwhile.half(chunk, 1);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kChunk * 4);
  _tile_stored(1, sums + 16, kChunk * 4);
  _tile_stored(2, sums2, kChunk * 4);
  _tile_stored(3, sums2 + 16, kChunk * 4);
}

#else

class TileRegisters {
 public:
  explicit TileRegisters(int, int = 64) {}
  void resize(int) {}
};

#endif

// Sums of R rows by 32 columns, in vector registers.
template <int R>
struct RowSums {
  Vec low[R], high[R];  // columns 0 to 15 and 16 to 31

  void clear() {
    for (int r = 0; r < R; r++) low[r] = high[r] = zeros();
  }

#if defined(__AVX512BF16__)
  void add(const bf16* left, const bf16* chunk) {
    for (int pair = 0; pair < 16; pair++) {
      const __m512bh b0 = load_bits(chunk + pair * 32), b1 = load_bits(chunk + kChunkSize / 2 + pair * 32);
      for (int r = 0; r < R; r++) {
        int32_t bits;
        std::memcpy(&bits, left + r * kChunk + 2 * pair, sizeof bits);
        const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
        low[r].v = _mm512_dpbf16_ps(low[r].v, a, b0);
        high[r].v = _mm512_dpbf16_ps(high[r].v, a, b1);
      }
    }
  }

  static __m512bh load_bits(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
#else
  void add(const bf16* left, const bf16* chunk) {
    for (int pair = 0; pair < 16; pair++) {
      Vec even, odd;
      load_pairs(chunk + pair * 32, even, odd);
      add_pair(left + 2 * pair, even, odd, low);
      load_pairs(chunk + kChunkSize / 2 + pair * 32, even, odd);
      add_pair(left + 2 * pair, even, odd, high);
    }
  }

  void add_pair(const bf16* left, const Vec& even, const Vec& odd, Vec* sums) {
    for (int r = 0; r < R; r++) {
      sums[r] = fma(broadcast(to_float(left[r * kChunk])), even, sums[r]);
      sums[r] = fma(broadcast(to_float(left[r * kChunk + 1])), odd, sums[r]);
    }
  }
#endif

  void add(const float* left, const float* chunk) {
    for (int k = 0; k < kChunk; k++) {
      const Vec b0 = load(chunk + k * kChunk), b1 = load(chunk + k * kChunk + kLanes);
      for (int r = 0; r < R; r++) {
        const Vec a = broadcast(left[r * kChunk + k]);
        low[r] = fma(a, b0, low[r]);
        high[r] = fma(a, b1, high[r]);
      }
    }
  }
};

// Rows first to first + R of the product.
template <int R, class E, class Right, class Meanwhile>
inline void multiply_rows(const E* left, int first, int num_chunks, Right& right, const Meanwhile& meanwhile, float* sums,
                          int64_t stride) {
  RowSums<R> rows;
  rows.clear();
  for (int i = 0; i < num_chunks; i++) {
    const E* chunk = right(i);
    meanwhile.half(chunk, 0);
    meanwhile.half(chunk, 1);
    rows.add(left + i * kRowTileSize + first * kChunk, chunk);
  }
  for (int r = 0; r < R; r++) {
    store(sums + (first + r) * stride, rows.low[r]);
    store(sums + (first + r) * stride + kLanes, rows.high[r]);
  }
}

#if defined(__AVX512F__)
constexpr int kMostRows = 8;  // as many as leave registers for the right side
#else
constexpr int kMostRows = 4;
#endif

// Some of the rows from `first` on, `left_over` in number; returns how many.
template <class E, class Right, class Meanwhile>
inline int multiply_group(const E* left, int first, int left_over, int num_chunks, Right& right,
                          const Meanwhile& meanwhile, float* sums, int64_t stride) {
  if (left_over >= kMostRows) {
    multiply_rows<kMostRows>(left, first, num_chunks, right, meanwhile, sums, stride);
    return kMostRows;
  }
  if (left_over >= 4) {
    multiply_rows<4>(left, first, num_chunks, right, meanwhile, sums, stride);
    return 4;
  }
  if (left_over >= 2) {
    multiply_rows<2>(left, first, num_chunks, right, meanwhile, sums, stride);
    return 2;
  }
  multiply_rows<1>(left, first, num_chunks, right, meanwhile, sums, stride);
  return 1;
}

// As above, for processors without tiles and for floats: the first group of rows does what is to be done meanwhile.
template <class E, class Right, class Meanwhile>
inline void multiply(const E* left, int rows, int num_chunks, Right right, const Meanwhile& meanwhile, float* sums,
                     int64_t stride) {
  if (rows == 0) return;
  int first = multiply_group(left, 0, rows, num_chunks, right, meanwhile, sums, stride);
  while (first < rows) first += multiply_group(left, first, rows - first, num_chunks, right, kNoFetch, sums, stride);
}

template <class E, class Right, class Meanwhile>
inline void multiply_two(const E* left, const E* left2, int num_chunks, Right right, const Meanwhile& meanwhile,
                         float* sums, float* sums2) {
  multiply(left, kTileRows, num_chunks, right, meanwhile, sums, kChunk);
  multiply(left2, kTileRows, num_chunks, right, kNoFetch, sums2, kChunk);
}

}  // namespace miniserve
