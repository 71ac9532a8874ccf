// Sixteen floats: one AVX-512 register, two AVX2 registers, or an array that the compiler vectorises as it can.
//
// All arithmetic of the kernels that is not a matrix tile goes through this type, so each formula stands once. Sums are
// in a fixed order: a result never depends on the instruction set's width or on how many rows are computed together.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace miniserve {

constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float to_float(float x) { return x; }

// Rounded to the nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  if (x != x) return {0x7fc0};
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void set(float& target, float x) { target = x; }
inline void set(bf16& target, float x) { target = to_bf16(x); }
inline void set(int8_t& target, float x) { target = static_cast<int8_t>(x); }

#if defined(__AVX512F__)

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

#elif defined(__AVX2__)

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

#else  // any processor

struct Vec {
  float v[kLanes];
};

template <class F>
inline Vec each_lane(F f) {
  Vec result;
  for (int i = 0; i < kLanes; i++) result.v[i] = f(i);
  return result;
}

inline Vec broadcast(float x) {
  return each_lane([&](int) { return x; });
}
inline Vec load(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
inline Vec load(const bf16* p) {
  return each_lane([&](int i) { return to_float(p[i]); });
}
template <class T>
inline void store(T* p, const Vec& a) {
  for (int i = 0; i < kLanes; i++) set(p[i], a.v[i]);
}
inline Vec operator+(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec max(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {  // two roundings where the processor has no fused form
  return each_lane([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec round(const Vec& a) {
  return each_lane([&](int i) { return std::nearbyintf(a.v[i]); });
}
inline Vec scale_by_power(const Vec& a, const Vec& n) {
  return each_lane([&](int i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}
inline void load_pairs(const bf16* p, Vec& even, Vec& odd) {
  even = each_lane([&](int i) { return to_float(p[2 * i]); });
  odd = each_lane([&](int i) { return to_float(p[2 * i + 1]); });
}

struct Ints {
  uint32_t v[kLanes];
};

template <class F>
inline Ints each_int(F f) {
  Ints result;
  for (int i = 0; i < kLanes; i++) result.v[i] = f(i);
  return result;
}

inline Ints ints(uint32_t x) {
  return each_int([&](int) { return x; });
}
inline Ints load(const uint32_t* p) {
  return each_int([&](int i) { return p[i]; });
}
inline Ints operator+(const Ints& a, const Ints& b) {
  return each_int([&](int i) { return a.v[i] + b.v[i]; });
}
inline Ints operator*(const Ints& a, const Ints& b) {
  return each_int([&](int i) { return a.v[i] * b.v[i]; });
}
inline Ints operator^(const Ints& a, const Ints& b) {
  return each_int([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int n>
inline Ints shift_right(const Ints& a) {
  return each_int([&](int i) { return a.v[i] >> n; });
}
inline Vec to_floats(const Ints& a) {
  return each_lane([&](int i) { return static_cast<float>(a.v[i]); });
}

struct Lanes {
  bool v[kLanes];
};

inline Lanes at_least(const Vec& a, const Vec& b) {
  Lanes result;
  for (int i = 0; i < kLanes; i++) result.v[i] = a.v[i] >= b.v[i];
  return result;
}
inline Lanes greater(const Vec& a, const Vec& b) {
  Lanes result;
  for (int i = 0; i < kLanes; i++) result.v[i] = a.v[i] > b.v[i];
  return result;
}
inline uint32_t bits(const Lanes& a) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; i++) result |= static_cast<uint32_t>(a.v[i]) << i;
  return result;
}
inline Vec keep(const Lanes& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] ? b.v[i] : 0.0f; });
}
inline Vec choose(const Lanes& a, const Vec& b, const Vec& c) {
  return each_lane([&](int i) { return a.v[i] ? b.v[i] : c.v[i]; });
}

#endif

#if !defined(__AVX512F__)
inline void store(bf16* p, const Vec& a, const Vec& b) {
  store(p, a);
  store(p + kLanes, b);
}
inline void store_to_pairs(bf16* p, int which, const bf16* x) {
  for (int i = 0; i < kLanes; i++) p[2 * i + which] = x[i];
}
inline void store_to_quads(uint8_t* p, int which, const uint8_t* x) {
  for (int i = 0; i < kLanes; i++) p[4 * i + which] = x[i];
}
#endif

// Thirty-two elements, of bf16 at once where the processor can.
inline void store(float* p, const Vec& a, const Vec& b) {
  store(p, a);
  store(p + kLanes, b);
}

inline Vec zeros() { return broadcast(0.0f); }

// The first `count` of sixteen floats; the rest is `fill`.
inline Vec load_part(const float* p, int64_t count, float fill) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = i < count ? p[i] : fill;
  return load(lanes);
}

// Rows of any size.
template <class E>
inline void load_row(const E* p, int64_t size, float* row) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(row + i, load(p + i));
  for (; i < size; i++) row[i] = to_float(p[i]);
}
template <class E>
inline void store_row(const float* row, int64_t size, E* p) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(p + i, load(row + i));
  for (; i < size; i++) set(p[i], row[i]);
}

// Lanes are joined as a tree of fixed shape: each with the one half a vector behind it, and so on with what is left.
#if defined(__AVX2__)
inline float sum(Vec a) {
  const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Vec a) {
  const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
template <class Join>
inline float join_lanes(Vec a, Join join) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) a.v[i] = join(a.v[i], a.v[i + width]);
  }
  return a.v[0];
}

inline float sum(const Vec& a) {
  return join_lanes(a, [](float x, float y) { return x + y; });
}
inline float largest(const Vec& a) {
  return join_lanes(a, [](float x, float y) { return x > y ? x : y; });
}
#endif

// 2^x for x in [-126, 127], by a polynomial for the fractional part (relative error below 2e-7).
inline Vec exp2(Vec x) {
  const Vec whole = round(x);
  const Vec t = x - whole;  // in [-0.5, 0.5]
  Vec p = broadcast(1.54035304e-4f);
  p = fma(p, t, broadcast(1.33335581e-3f));  // the coefficients of e^(t ln 2)
  p = fma(p, t, broadcast(9.61812911e-3f));
  p = fma(p, t, broadcast(5.55041087e-2f));
  p = fma(p, t, broadcast(2.40226507e-1f));
  p = fma(p, t, broadcast(6.93147181e-1f));
  p = fma(p, t, broadcast(1.0f));
  return scale_by_power(p, whole);
}

inline Vec exp(Vec x) {
  const Vec bounded = max(broadcast(-87.0f), min(broadcast(87.0f), x));  // in this order NaN stays NaN
  return exp2(bounded * broadcast(1.44269504f));
}

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zeros() - x)); }

// Its tanh form: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline Vec gelu_tanh(Vec x) {
  const Vec y = x * fma(x * x, broadcast(0.044715f), broadcast(1.0f)) * broadcast(0.797884561f);
  return x / (broadcast(1.0f) + exp(zeros() - y - y));
}

// Of gpt-oss: both clamped, a steeper sigmoid, and `up` around one.
inline Vec clamped_swiglu(Vec gate, Vec up) {
  const Vec limit = broadcast(7.0f);
  gate = min(limit, gate);  // in this order NaN stays NaN
  up = max(zeros() - limit, min(limit, up));
  const Vec sigmoid = broadcast(1.0f) / (broadcast(1.0f) + exp(gate * broadcast(-1.702f)));
  return (up + broadcast(1.0f)) * gate * sigmoid;
}

inline Vec tanh(Vec x) {
  const Vec e = exp(x + x);
  return broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
}

}  // namespace miniserve
