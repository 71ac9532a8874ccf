// Sixteen floats as an array that the compiler vectorises as it can, on any processor: see vec.h.
#pragma once

#include "elements.h"

namespace miniserve {

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

}  // namespace miniserve
