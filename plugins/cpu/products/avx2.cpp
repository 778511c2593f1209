// AVX2. vpmaddwd multiplies pairs of 16-bit numbers exactly. Codes of 4 bits may use vpmaddubsw, which saturates at
// 32767: 4 units give a 16-bit lane 16 products of at most 15 * 127, together 30480.

#include <type_traits>

#include "later.h"
#include "multiply.h"
#include "ymm.h"

namespace {

struct Avx2 : Ymm {
  using One = Avx2;
  template <int kBits>
  using Input = std::conditional_t<kBits == 8, int16_t, int8_t>;

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t, const uint8_t *q, int block,
                           const uint8_t *later) {
    if constexpr (kBits == 8) {
#pragma GCC unroll 8
      for (int input = 0; input < block; input += 4, codes += kLine, later += kLine, q += 8 * kRows) {
        load_later(later);
        add_unit<kRows>(sums, codes, q);
      }
    } else if (block == 16) {
      add_units<kRows, 2>(sums, codes, q, later);
    } else {
      for (int input = 0; input < block; input += 32, codes += 4 * kLine, later += 4 * kLine, q += 32 * kRows) {
        add_units<kRows, 4>(sums, codes, q, later);
      }
    }
  }

  // Keeps the compiler from adding products to each other first, which needs more registers than there are.
  static Ints in_register(Ints sums) {
    __asm__("" : "+x"(sums));
    return sums;
  }

  // 4 inputs of 8 bits: the even bytes of 16 bits, then the odd ones.
  template <int kRows>
  static void add_unit(Ints (&sums)[kRows][kVectors], const uint8_t *codes, const uint8_t *q) {
    for (int odd = 0; odd < 2; ++odd) {
      Ints pairs[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const Ints bytes = load_bytes(codes + 32 * v);
        pairs[v] = odd ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
      }
      for (int row = 0; row < kRows; ++row) {
        const Ints inputs = ints(load_int(q + 8 * row + 4 * odd));
        for (int v = 0; v < kVectors; ++v) {
          sums[row][v] = in_register(_mm256_add_epi32(sums[row][v], _mm256_madd_epi16(pairs[v], inputs)));
        }
      }
    }
  }

  // 8 kUnits inputs of 4 bits.
  template <int kRows, int kUnits>
  static void add_units(Ints (&sums)[kRows][kVectors], const uint8_t *codes, const uint8_t *q, const uint8_t *later) {
    Ints short_sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int part = 0; part < 2 * kUnits; ++part) {
      if (part % 2 == 0) load_later(later + part / 2 * kLine);
      Ints halves[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const Ints bytes = load_bytes(codes + part / 2 * kLine + 32 * v);
        halves[v] = part % 2 ? high_halves(bytes) : low_halves(bytes);
      }
      for (int row = 0; row < kRows; ++row) {
        const Ints inputs = ints(load_int(q + 4 * (part * kRows + row)));
        for (int v = 0; v < kVectors; ++v) {
          const Ints products = _mm256_maddubs_epi16(halves[v], inputs);
          short_sums[row][v] = in_register(part == 0 ? products : _mm256_add_epi16(short_sums[row][v], products));
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        const Ints products = _mm256_madd_epi16(short_sums[row][v], _mm256_set1_epi16(1));
        sums[row][v] = _mm256_add_epi32(sums[row][v], products);
      }
    }
  }
};

bool is_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

const Kernels redraft::products::kAvx2 = {"avx2", is_here, scratch_bytes<Avx2>, quantize<Avx2>, multiply<Avx2>};
