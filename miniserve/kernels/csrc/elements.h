// Single elements: bf16, and what becomes of a float that is stored as another type.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace miniserve {

constexpr int kLanes = 16;  // of a vector

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

}  // namespace miniserve
