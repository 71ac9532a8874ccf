// Sixteen floats: one AVX-512 register, two AVX2 registers, or an array that the compiler vectorises as it can.
//
// All arithmetic of the kernels that is not a matrix tile goes through this type, so each formula stands once. Sums are
// in a fixed order: a result never depends on the instruction set's width or on how many rows are computed together.
#pragma once

#include "elements.h"

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace miniserve {

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
