// Vectors of AVX-512: a tile's columns in one register.

#pragma once

#ifdef REDRAFT_EMULATED
#include "emulated.h"
#else
#include <immintrin.h>
#endif

#include <stdint.h>

namespace {

struct Zmm {
  using Ints = __m512i;
  using Floats = __m512;
  using Registers = AnyRegisters;
  static constexpr int kUnit = 4, kLeastRows = 1;
  template <int kBits>
  using Input = int8_t;

  static Ints ints(int32_t value) { return _mm512_set1_epi32(value); }
  static Ints inputs(const uint8_t *q) { return ints(load_int(q)); }
  static int32_t zero_code(int32_t code) { return code; }
  static Ints zero_points(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  }
  static Floats floats(float value) { return _mm512_set1_ps(value); }
  static Floats load_floats(const void *from) { return _mm512_loadu_ps(from); }
  static Floats to_floats(Ints values) { return _mm512_cvtepi32_ps(values); }
  static void store(float *to, Floats values) { _mm512_storeu_ps(to, values); }
  // a: 0 .. 255, b: 16 bits.
  static Ints times(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  static Ints load_bytes(const uint8_t *from) { return _mm512_loadu_si512(from); }
  static void store_bytes(uint8_t *to, Ints bytes) { _mm512_storeu_si512(to, bytes); }
  static Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints low_halves(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static Ints high_halves(Ints bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }
};

}  // namespace
