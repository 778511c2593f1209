// Vectors of AVX2: a tile's columns in two registers.

#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct Ymm {
  using Ints = __m256i;
  using Floats = __m256;
  using Registers = AnyRegisters;
  static constexpr int kUnit = 4, kLeastRows = 1, kTiles = 1, kVectors = 2, kMostRows = 6;

  static Ints ints(int32_t value) { return _mm256_set1_epi32(value); }
  static Ints inputs(const uint8_t *q) { return ints(load_int(q)); }
  static int32_t zero_code(int32_t code) { return code; }
  static Ints zero_points(const uint8_t *from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
  }
  static Floats floats(float value) { return _mm256_set1_ps(value); }
  static Floats load_floats(const void *from) { return _mm256_loadu_ps(static_cast<const float *>(from)); }
  static Floats to_floats(Ints values) { return _mm256_cvtepi32_ps(values); }
  static void store(float *to, Floats values) { _mm256_storeu_ps(to, values); }
  // a: 0 .. 255, b: 16 bits.
  static Ints times(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
  static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

  static Ints load_bytes(const uint8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
  static Ints low_halves(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static Ints high_halves(Ints bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }
};

}  // namespace
