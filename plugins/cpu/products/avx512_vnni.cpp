// AVX-512 VNNI: a tile's columns in one register, vpdpbusd on 64 bytes.

#ifdef REDRAFT_EMULATED
#include "emulated.h"
#else
#include <immintrin.h>
#endif

#include "dot.h"
#include "multiply.h"

namespace {

struct Avx512Vnni {
  using Ints = __m512i;
  using Floats = __m512;
  template <int kBits>
  using Input = int8_t;
  static constexpr int kVectors = 1, kMostRows = 12;

  static Ints ints(int32_t value) { return _mm512_set1_epi32(value); }
  static Ints zero_point(int32_t code) { return ints(code); }
  static Ints zero_points(const uint8_t *from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  }
  static Floats floats(float value) { return _mm512_set1_ps(value); }
  static Floats load_floats(const uint8_t *from) { return _mm512_loadu_ps(from); }
  static Floats to_floats(Ints values) { return _mm512_cvtepi32_ps(values); }
  static void store(float *to, Floats values) { _mm512_storeu_ps(to, values); }
  // a: 0 .. 255, b: 16 bits.
  static Ints times(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  static Ints load_bytes(const uint8_t *from) { return _mm512_loadu_si512(from); }
  static Ints low_halves(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static Ints high_halves(Ints bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }

  static Ints dot(Ints sums, Ints codes, const uint8_t *q) {
    return _mm512_dpbusd_epi32(sums, codes, ints(load_int(q)));
  }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, const uint8_t *q, int block) {
    add_dots<Avx512Vnni, kBits, kRows>(sums, codes, q, block);
  }
};

bool is_here() {
#ifdef REDRAFT_EMULATED
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vnni");
#endif
}

}  // namespace

const Kernels redraft::products::kAvx512Vnni = {"avx512_vnni", is_here, scratch_bytes<Avx512Vnni>, quantize<Avx512Vnni>,
                                                multiply<Avx512Vnni>};
