// The numbers of a cache: fp32, or fp16 (IEEE binary16) in plain C++. Nothing here depends on how a CPU treats subnormals.
//
// Each file with flags of its own has its own copy: a shared one could have instructions that the CPU lacks.

#pragma once

#include <stdint.h>
#include <string.h>

namespace {

struct Half {
  uint16_t bits;
};

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widened(float x) { return x; }

inline float widened(Half x) {
#ifdef __aarch64__
  __fp16 value;
  memcpy(&value, &x, sizeof value);
  return value;
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);            // infinity or NaN
  if (rest >= 0x400) return float_of(sign | ((rest << 13) + 0x38000000));         // biases of exponents are 127 and 15
  return float_of(sign | bits_of(float_of(0x38800000 | rest << 13) - 0x1p-14f));  // 2^-14 (1 + rest / 1024) - 2^-14
#endif
}

// x rounded to nearest, ties to even.
template <typename Number>
Number rounded(float x);

template <>
inline float rounded(float x) {
  return x;
}

template <>
inline Half rounded(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
  uint32_t found;
  if (rest > 0x7f800000) {
    found = 0x7e00;  // NaN
  } else if (rest >= 0x477fe000) {
    found = 0x7bff;  // 65504, the largest number
  } else if (rest >= 0x38800000) {
    found = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  } else {
    found = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);  // near 0.5, numbers are 2^-24 apart, as subnormals are
  }
  return {static_cast<uint16_t>(sign | found)};
}

}  // namespace
