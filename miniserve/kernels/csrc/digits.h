// Products of whole numbers: rows of digits, from -127 to 127, times codes of a byte, from 0 to 255.
//
//   digit tile   [16 rows][64 k]
//   codes        [2 halves][quads of k][16 columns][4]: of 64 k, or of 32
//
// Sums of whole numbers are exact, so every instruction set and every grouping of rows gives the same.
#pragma once

#include "tile.h"

namespace miniserve {

constexpr int kDigitChunk = 64;
constexpr int kDigitTileSize = kTileRows * kDigitChunk;
constexpr int kHalf = 16;  // columns
constexpr int kDigitQuads = 16, kGroupQuads = 8;  // of a chunk of 64 k, and of one of 32

// Where the code of (k, column) lies in a chunk of 32 k.
inline int group_code_offset(int k, int column) {
  return (column / kHalf) * (kGroupQuads * 64) + k / 4 * 64 + column % kHalf * 4 + k % 4;
}

// Sixteen sums, one a column.
#if defined(__AVX512VNNI__)

struct IntVec {
  __m512i v;
};
struct CodeVec {  // four codes a column
  __m512i v;
};
inline IntVec no_ints() { return {_mm512_setzero_si512()}; }
inline IntVec load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, IntVec a) { _mm512_storeu_si512(p, a.v); }
inline void store(uint8_t* p, CodeVec a) { _mm512_storeu_si512(p, a.v); }
inline Vec to_floats(IntVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline IntVec minus(IntVec a, int32_t x) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(x))}; }
// 128 a + b
inline IntVec join_digits(IntVec a, IntVec b) { return {_mm512_add_epi32(_mm512_slli_epi32(a.v, 7), b.v)}; }
inline CodeVec load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// The low and the high four bits of 64 bytes.
inline void load_short_codes(const uint8_t* p, CodeVec& low, CodeVec& high) {
  const __m512i bytes = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low.v = _mm512_and_si512(bytes, mask);
  high.v = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
}
// Adds to each column the product of four of its codes and the four digits at `quad`.
inline IntVec add_quad(IntVec sums, CodeVec codes, const int8_t* quad) {
  int32_t digits;
  std::memcpy(&digits, quad, sizeof digits);
  return {_mm512_dpbusd_epi32(sums.v, codes.v, _mm512_set1_epi32(digits))};
}

#elif defined(__AVX2__)

struct IntVec {
  __m256i lo, hi;
};
struct CodeVec {
  __m256i lo, hi;
};
inline IntVec no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline IntVec load_ints(const int32_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store(int32_t* p, IntVec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline Vec to_floats(IntVec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline IntVec minus(IntVec a, int32_t x) {
  const __m256i all = _mm256_set1_epi32(x);
  return {_mm256_sub_epi32(a.lo, all), _mm256_sub_epi32(a.hi, all)};
}
inline IntVec join_digits(IntVec a, IntVec b) {
  return {_mm256_add_epi32(_mm256_slli_epi32(a.lo, 7), b.lo), _mm256_add_epi32(_mm256_slli_epi32(a.hi, 7), b.hi)};
}
inline CodeVec load_codes(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void load_short_codes(const uint8_t* p, CodeVec& low, CodeVec& high) {
  const CodeVec bytes = load_codes(p);
  const __m256i mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(bytes.lo, mask), _mm256_and_si256(bytes.hi, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(bytes.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(bytes.hi, 4), mask)};
}
// Two bytes of each column at a time, widened to 16 bits, where no product is cut.
inline __m256i add_quad(__m256i sums, __m256i codes, __m256i even_digits, __m256i odd_digits) {
  const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(codes, 8);
  const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, even_digits), _mm256_madd_epi16(odd, odd_digits));
  return _mm256_add_epi32(sums, products);
}
inline IntVec add_quad(IntVec sums, CodeVec codes, const int8_t* quad) {
  int32_t digits;
  std::memcpy(&digits, quad, sizeof digits);
  const __m256i all = _mm256_set1_epi32(digits);
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
  return {add_quad(sums.lo, codes.lo, even, odd), add_quad(sums.hi, codes.hi, even, odd)};
}

#else

struct IntVec {
  int32_t v[kHalf];
};
struct CodeVec {
  uint8_t v[64];
};
inline IntVec no_ints() { return {}; }
inline IntVec load_ints(const int32_t* p) {
  IntVec a;
  std::memcpy(a.v, p, sizeof a.v);
  return a;
}
inline void store(int32_t* p, const IntVec& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Vec to_floats(const IntVec& a) {
  return each_lane([&](int i) { return static_cast<float>(a.v[i]); });
}
inline IntVec minus(IntVec a, int32_t x) {
  for (int32_t& lane : a.v) lane -= x;
  return a;
}
inline IntVec join_digits(IntVec a, const IntVec& b) {
  for (int i = 0; i < kHalf; i++) a.v[i] = 128 * a.v[i] + b.v[i];
  return a;
}
inline CodeVec load_codes(const uint8_t* p) {
  CodeVec codes;
  std::memcpy(codes.v, p, sizeof codes.v);
  return codes;
}
inline void load_short_codes(const uint8_t* p, CodeVec& low, CodeVec& high) {
  for (int i = 0; i < 64; i++) {
    low.v[i] = p[i] & 15;
    high.v[i] = p[i] >> 4;
  }
}
inline IntVec add_quad(IntVec sums, const CodeVec& codes, const int8_t* quad) {
  for (int column = 0; column < kHalf; column++) {
    for (int i = 0; i < 4; i++) sums.v[column] += static_cast<int32_t>(codes.v[column * 4 + i]) * quad[i];
  }
  return sums;
}

#endif

// Where chunk i of `quads` quads begins in a digit tile's rows.
template <int quads>
inline int64_t digits_at(int i) {
  return quads == kDigitQuads ? i * kDigitTileSize : i / 2 * kDigitTileSize + i % 2 * (kDigitChunk / 2);
}

// sums [R][32] of R rows of digits, over num_chunks chunks.
template <int quads, int R, class Codes>
inline void multiply_digit_rows(const int8_t* left, int num_chunks, Codes& codes, int32_t* sums) {
  IntVec low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = no_ints();
  for (int i = 0; i < num_chunks; i++) {
    const uint8_t* chunk = codes(i);
    for (int quad = 0; quad < quads; quad++) {
      const CodeVec first = load_codes(chunk + quad * 64), second = load_codes(chunk + (quads + quad) * 64);
      for (int r = 0; r < R; r++) {
        const int8_t* digits = left + digits_at<quads>(i) + r * kDigitChunk + quad * 4;
        low[r] = add_quad(low[r], first, digits);
        high[r] = add_quad(high[r], second, digits);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    store(sums + r * kChunk, low[r]);
    store(sums + r * kChunk + kHalf, high[r]);
  }
}

template <int quads, class Codes>
inline void multiply_digits_in_vectors(const int8_t* left, int rows, int num_chunks, Codes codes, int32_t* sums) {
  for (int first = 0; first < rows;) {
    const int8_t* from = left + first * kDigitChunk;
    int32_t* to = sums + first * kChunk;
    const int group = rows - first;
    if (group >= 8) {
      multiply_digit_rows<quads, 8>(from, num_chunks, codes, to);
      first += 8;
    } else if (group >= 4) {
      multiply_digit_rows<quads, 4>(from, num_chunks, codes, to);
      first += 4;
    } else if (group >= 2) {
      multiply_digit_rows<quads, 2>(from, num_chunks, codes, to);
      first += 2;
    } else {
      multiply_digit_rows<quads, 1>(from, num_chunks, codes, to);
      first += 1;
    }
  }
}

// sums [rows][32] of up to 16 rows of digit tiles, over num_chunks chunks; codes(i) are those of chunk i. With AMX,
// `TileRegisters` must be set up for these rows, of 4 bytes a quad.
template <int quads, class Codes>
inline void multiply_digits(const int8_t* left, int rows, int num_chunks, Codes codes, int32_t* sums) {
#if defined(__AMX_INT8__)
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i < num_chunks; i++) {
    const uint8_t* chunk = codes(i);
    MINISERVE_TILE_LOAD(4, left + digits_at<quads>(i), kDigitChunk);
    MINISERVE_TILE_LOAD(6, chunk, 64);
    _tile_dpbsud(0, 4, 6);
    MINISERVE_TILE_LOAD(7, chunk + quads * 64, 64);
    _tile_dpbsud(1, 4, 7);
  }
  _tile_stored(0, sums, kChunk * 4);
  _tile_stored(1, sums + kHalf, kChunk * 4);
#else
  multiply_digits_in_vectors<quads>(left, rows, num_chunks, codes, sums);
#endif
}

// The same for two whole tiles that share the codes.
template <int quads, class Codes>
inline void multiply_digits_two(const int8_t* left, const int8_t* left2, int num_chunks, Codes codes, int32_t* sums,
                                int32_t* sums2) {
#if defined(__AMX_INT8__)
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < num_chunks; i++) {
    const uint8_t* chunk = codes(i);
    MINISERVE_TILE_LOAD(4, left + digits_at<quads>(i), kDigitChunk);
    MINISERVE_TILE_LOAD(6, chunk, 64);
    _tile_dpbsud(0, 4, 6);
    MINISERVE_TILE_LOAD(7, chunk + quads * 64, 64);
    _tile_dpbsud(1, 4, 7);
    MINISERVE_TILE_LOAD(5, left2 + digits_at<quads>(i), kDigitChunk);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, sums, kChunk * 4);
  _tile_stored(1, sums + kHalf, kChunk * 4);
  _tile_stored(2, sums2, kChunk * 4);
  _tile_stored(3, sums2 + kHalf, kChunk * 4);
#else
  multiply_digits_in_vectors<quads>(left, kTileRows, num_chunks, codes, sums);
  multiply_digits_in_vectors<quads>(left2, kTileRows, num_chunks, codes, sums2);
#endif
}

constexpr float kDigitBase = 128.0f;
constexpr float kLargestDigit = 127.0f;

// row [size], whole vectors, becomes whole numbers of D digits; returns what one of them stands for. A row that is not
// finite becomes zeros and NaN.
template <int D>
inline float make_whole(float* row, int64_t size) {
  Vec most = zeros(), not_finite = zeros();
  for (int64_t k = 0; k < size; k += kLanes) {
    const Vec x = load(row + k);
    most = max(most, max(x, zeros() - x));
    not_finite = not_finite + (x - x);
  }
  constexpr float steps = D == 1 ? kLargestDigit : kLargestDigit * kDigitBase;
  const float largest_size = largest(most);
  const bool is_finite = sum(not_finite) == 0.0f;
  const float inverse = is_finite && largest_size > 0.0f ? steps / largest_size : 0.0f;
  for (int64_t k = 0; k < size; k += kLanes) {
    store(row + k, is_finite ? round(load(row + k) * broadcast(inverse)) : zeros());
  }
  return is_finite ? largest_size / steps : std::nanf("");
}

// The digits of 32 whole numbers, those behind the first in the tile's next row. Adds them to sums [D].
template <int D>
inline void split_digits(const float* whole, int8_t* digits, Vec* sums) {
  for (int i = 0; i < kChunk; i += kLanes) {
    const Vec x = load(whole + i);
    const Vec first = D == 1 ? x : round(x * broadcast(1.0f / kDigitBase));
    store(digits + i, first);
    sums[0] = sums[0] + first;
    if (D == 1) continue;
    const Vec second = x - first * broadcast(kDigitBase);
    store(digits + kDigitChunk + i, second);
    sums[D - 1] = sums[D - 1] + second;
  }
}

template <int D>
inline void split_digits(const float* whole, int8_t* digits, int32_t* sums) {
  Vec added[D];
  for (Vec& of_digit : added) of_digit = zeros();
  split_digits<D>(whole, digits, added);
  for (int digit = 0; digit < D; digit++) sums[digit] += static_cast<int32_t>(sum(added[digit]));
}

// 16 columns of products of D digit rows with codes around 128, as floats; sums are those of the rows' digits.
template <int D>
inline Vec whole_products(const int32_t* products, const int32_t* sums) {
  const Vec first = to_floats(minus(load_ints(products), 128 * sums[0]));
  if (D == 1) return first;
  return fma(first, broadcast(kDigitBase), to_floats(minus(load_ints(products + kChunk), 128 * sums[D - 1])));
}

}  // namespace miniserve
