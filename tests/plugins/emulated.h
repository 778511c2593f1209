// The intrinsics of AVX-512, its VNNI and AVX-VNNI that products and attention use, on plain arrays, for CPUs that lack
// them. Included instead of immintrin.h, or after it for a file that is compiled with AVX2.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class T, int kCount>
struct Vector {
  T of[kCount];
};

template <class To, class From>
To as(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "the same bytes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Each lane's sum and its four products of an unsigned and a signed byte, modulo 2^32.
template <int kLanes, class Ints>
Ints dpbusd(const Ints &sums, const Ints &a, const Ints &b) {
  auto found = as<Vector<uint32_t, kLanes>>(sums);
  const auto codes = as<Vector<uint8_t, 4 * kLanes>>(a);
  const auto inputs = as<Vector<int8_t, 4 * kLanes>>(b);
  for (int i = 0; i < 4 * kLanes; ++i) found.of[i / 4] += static_cast<uint32_t>(codes.of[i] * inputs.of[i]);
  return as<Ints>(found);
}

}  // namespace emulated

#ifdef __AVX2__

static inline __m256i emulated_dpbusd(__m256i sums, __m256i a, __m256i b) { return emulated::dpbusd<8>(sums, a, b); }
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

template <class Floats>
static inline Floats emulated_fmadd(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 16; ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
}
#define _mm512_fmadd_ps emulated_fmadd

typedef float emulated_floats __attribute__((vector_size(64)));
static inline emulated_floats emulated_cvtph(int, __m256i halves) {
  float found[16];
  _mm256_storeu_ps(found, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  _mm256_storeu_ps(found + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  return emulated::as<emulated_floats>(found);
}
#define _mm512_maskz_cvtph_ps emulated_cvtph

#else

using __m128i = emulated::Vector<uint8_t, 16>;
using __m512i = emulated::Vector<int32_t, 16>;
using __m512 = emulated::Vector<float, 16>;

static inline __m128i _mm_loadu_si128(const __m128i *from) {
  __m128i bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

static inline __m512i _mm512_loadu_si512(const void *from) {
  __m512i bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

static inline void _mm512_storeu_si512(void *to, __m512i bytes) { std::memcpy(to, &bytes, sizeof bytes); }

static inline __m512 _mm512_loadu_ps(const void *from) { return emulated::as<__m512>(_mm512_loadu_si512(from)); }

static inline void _mm512_storeu_ps(void *to, __m512 values) { std::memcpy(to, &values, sizeof values); }

static inline __m512i _mm512_set1_epi32(int32_t value) {
  __m512i found;
  for (auto &lane : found.of) lane = value;
  return found;
}

static inline __m512 _mm512_set1_ps(float value) {
  __m512 found;
  for (auto &lane : found.of) lane = value;
  return found;
}

static inline __m512i _mm512_set1_epi8(int8_t value) {
  emulated::Vector<int8_t, 64> found;
  for (auto &byte : found.of) byte = value;
  return emulated::as<__m512i>(found);
}

static inline __m512i _mm512_cvtepu8_epi32(__m128i bytes) {
  __m512i found;
  for (int i = 0; i < 16; ++i) found.of[i] = bytes.of[i];
  return found;
}

static inline __m512 _mm512_cvtepi32_ps(__m512i values) {
  __m512 found;
  for (int i = 0; i < 16; ++i) found.of[i] = static_cast<float>(values.of[i]);
  return found;
}

static inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  for (int i = 0; i < 16; ++i) a.of[i] &= b.of[i];
  return a;
}

static inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  for (int i = 0; i < 16; ++i) a.of[i] += b.of[i];
  return a;
}

static inline __m512i _mm512_srli_epi16(__m512i values, unsigned count) {
  auto found = emulated::as<emulated::Vector<uint16_t, 32>>(values);
  for (auto &each : found.of) each = static_cast<uint16_t>(each >> count);
  return emulated::as<__m512i>(found);
}

static inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  using Shorts = emulated::Vector<int16_t, 32>;
  const auto left = emulated::as<Shorts>(a), right = emulated::as<Shorts>(b);
  __m512i found;
  for (int i = 0; i < 16; ++i) {
    found.of[i] = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
  }
  return found;
}

static inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  return emulated::dpbusd<16>(sums, a, b);
}

static inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  for (int i = 0; i < 16; ++i) a.of[i] *= b.of[i];
  return a;
}

static inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) a.of[i] = std::fma(a.of[i], b.of[i], c.of[i]);
  return a;
}

#endif
