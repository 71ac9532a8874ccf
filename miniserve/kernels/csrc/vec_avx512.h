// Sixteen floats as one AVX-512 register: see vec.h.
#pragma once

#include "elements.h"

namespace miniserve {

struct Vec {
  __m512 v;
};

inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, Vec a) {
  const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
  std::memcpy(p, &rounded, sizeof rounded);
}
inline void store(bf16* p, Vec a, Vec b) {
  const __m512bh rounded = _mm512_cvtne2ps_pbh(b.v, a.v);
  std::memcpy(p, &rounded, sizeof rounded);
}
// Whole numbers of a byte.
inline void store(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a b + c
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// a 2^n for whole n
inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// The two bf16 of each 32-bit lane, as two vectors: even elements, odd elements.
inline void load_pairs(const bf16* p, Vec& even, Vec& odd) {
  const __m512i bits = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Sixteen bf16 as the even or odd (`which`) elements of 32; the others are not touched.
inline void store_to_pairs(bf16* p, int which, const bf16* x) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  _mm512_mask_storeu_epi16(p, 0x55555555u << which, _mm512_sll_epi32(bits, _mm_cvtsi32_si128(16 * which)));
}
// The same for bytes as every fourth of 64.
inline void store_to_quads(uint8_t* p, int which, const uint8_t* x) {
  const __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  _mm512_mask_storeu_epi8(p, 0x1111111111111111u << which, _mm512_sll_epi32(bits, _mm_cvtsi32_si128(8 * which)));
}

// Sixteen 32-bit integers; their arithmetic is modulo 2^32.
struct Ints {
  __m512i v;
};

inline Ints ints(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline Ints load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n>
inline Ints shift_right(Ints a) {
  return {_mm512_srli_epi32(a.v, n)};
}
inline Vec to_floats(Ints a) { return {_mm512_cvtepu32_ps(a.v)}; }

// Some of the sixteen lanes; NaN is neither at least nor greater than anything.
struct Lanes {
  __mmask16 v;
};

inline Lanes at_least(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Lanes greater(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline uint32_t bits(Lanes a) { return _cvtmask16_u32(a.v); }
inline Vec keep(Lanes a, Vec b) { return {_mm512_maskz_mov_ps(a.v, b.v)}; }  // 0 in the other lanes
inline Vec choose(Lanes a, Vec b, Vec c) { return {_mm512_mask_blend_ps(a.v, c.v, b.v)}; }  // c in the other lanes

inline __m256 low_half(Vec a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(Vec a) { return _mm512_extractf32x8_ps(a.v, 1); }

}  // namespace miniserve
