// How quantised matrices lie in memory: whole numbers of 8 or 4 bits, and what makes elements of them (see `Grid`).
//
// Layout: panels of 32 columns, each a list of chunks. With whole rows, a chunk is the codes of 64 k, and the scales lie
// elsewhere. In groups, a chunk is one group of 32 k: its codes, then 32 scales, then 32 offsets if there are any. Codes
// of 4 bits share a byte: the first half of the columns its low bits, the second half its high ones.
#pragma once

#include "digits.h"
#include "kernels.h"
#include "threads.h"

namespace miniserve {

constexpr int kGroup = 32;
constexpr int kGroupCodes = kGroup * kChunk;
constexpr int kHalvesBytes = kChunk * sizeof(uint16_t);  // scales, or offsets, of a chunk

inline int chunk_k(const Grid& grid) { return grid.whole_rows ? kDigitChunk : kGroup; }

inline int64_t codes_bytes(const Grid& grid) { return static_cast<int64_t>(chunk_k(grid)) * kChunk * grid.bits / 8; }

inline int64_t chunk_bytes(const Grid& grid) {
  return codes_bytes(grid) + (grid.whole_rows ? 0 : kHalvesBytes) + (grid.has_offsets ? kHalvesBytes : 0);
}

inline int64_t num_chunks(const Grid& grid) { return round_up(grid.size, chunk_k(grid)) / chunk_k(grid); }

inline int zero_of(const Grid& grid) { return grid.bits == 8 ? 128 : 8; }

// Where the code of (k, column) of a chunk lies, were it a byte.
inline int code_offset(const Grid& grid, int k, int column) {
  const int half = chunk_k(grid) * kHalf;
  return column / kHalf * half + k / 4 * 64 + column % kHalf * 4 + k % 4;
}

// An IEEE half.
inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits & 0x8000 ? -size : size;
#endif
}

// Sixteen of them.
inline Vec load_halves(const uint8_t* halves) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))};
#else
  uint16_t bits[kLanes];
  float values[kLanes];
  std::memcpy(bits, halves, sizeof bits);
  for (int i = 0; i < kLanes; i++) values[i] = half_to_float(bits[i]);
  return load(values);
#endif
}

// The scales and offsets of a chunk.
struct GroupScales {
  Vec low, high, low_offsets, high_offsets;

  GroupScales(const Grid& grid, const uint8_t* chunk) {
    const uint8_t* scales = chunk + codes_bytes(grid);
    low = load_halves(scales);
    high = load_halves(scales + kHalvesBytes / 2);
    if (!grid.has_offsets) return;
    low_offsets = load_halves(scales + kHalvesBytes);
    high_offsets = load_halves(scales + kHalvesBytes * 3 / 2);
  }
};

#if defined(__AMX_INT8__)
// 1024 codes of 4 bits, a byte each.
inline void unpack_codes(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < kGroupCodes / 2; i += 64) {
    CodeVec low, high;
    load_short_codes(packed + i, low, high);
    store(codes + i, low);
    store(codes + kGroupCodes / 2 + i, high);
  }
}
#endif

}  // namespace miniserve
