// 8 rows of 8 numbers as columns in fp32, by AVX and F16C.

#pragma once

#include <immintrin.h>

#include "half.h"

namespace {

struct AvxTranspose {
  static __m256 eight(const float *from) { return _mm256_loadu_ps(from); }
  static __m256 eight(const Half *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  }

  // Writes number first + i of row r to to[16 i + r], i < 8, r < 8.
  template <typename Number>
  static void transpose(const Number *const *rows, int64_t first, float *to) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = eight(rows[i] + first);
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
      _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
  }
};

}  // namespace
