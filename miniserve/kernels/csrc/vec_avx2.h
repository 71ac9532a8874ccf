// Sixteen floats as two AVX2 registers: see vec.h; what is not obvious is said in vec_avx512.h.
#pragma once

#include "elements.h"

namespace miniserve {

struct Vec {
  __m256 lo, hi;
};

inline __m256 widen_bf16(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256i narrow_bf16(__m256 x) {  // the bf16 in the low half of each lane
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}

inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Vec load(const bf16* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, Vec a) {
  const __m256i packed = _mm256_packus_epi32(narrow_bf16(a.lo), narrow_bf16(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(int8_t* p, Vec a) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i shorts = _mm256_permute4x64_epi64(packed, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec round(Vec a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline Vec scale_by_power(Vec a, Vec n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }
inline void load_pairs(const bf16* p, Vec& even, Vec& odd) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))};
}

struct Ints {
  __m256i lo, hi;
};

inline Ints ints(uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
inline Ints load(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints operator*(Ints a, Ints b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline Ints operator^(Ints a, Ints b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int n>
inline Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.lo, n), _mm256_srli_epi32(a.hi, n)};
}
// There is only a conversion of signed integers: both halves are exact, and their sum is rounded once.
inline __m256 unsigned_to_floats(__m256i a) {
  const __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(a, 16));
  const __m256 lower = _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0f), lower);
}
inline Vec to_floats(Ints a) { return {unsigned_to_floats(a.lo), unsigned_to_floats(a.hi)}; }

struct Lanes {
  __m256 lo, hi;
};

inline Lanes at_least(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
inline Lanes greater(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
inline uint32_t bits(Lanes a) {
  return static_cast<uint32_t>(_mm256_movemask_ps(a.lo)) | static_cast<uint32_t>(_mm256_movemask_ps(a.hi)) << 8;
}
inline Vec keep(Lanes a, Vec b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
inline Vec choose(Lanes a, Vec b, Vec c) {
  return {_mm256_blendv_ps(c.lo, b.lo, a.lo), _mm256_blendv_ps(c.hi, b.hi, a.hi)};
}

inline __m256 low_half(Vec a) { return a.lo; }
inline __m256 high_half(Vec a) { return a.hi; }

}  // namespace miniserve
