// Quantizes a block with AVX2, to the same bits as quantize.h.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

inline int32_t reduce(__m128i (*join)(__m128i, __m128i), __m256i values) {
  __m128i found = join(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  found = join(found, _mm_shuffle_epi32(found, 0x4e));
  return _mm_cvtsi128_si32(join(found, _mm_shuffle_epi32(found, 0xb1)));
}

inline __m128i largest(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }
inline __m128i sum(__m128i a, __m128i b) { return _mm_add_epi32(a, b); }

// 16 numbers of x / divisor in 16 bits, rounded to the nearest integer, ties to even.
inline __m256i rounded(const float *x, __m256 divisor) {
  __m256i whole[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 value = _mm256_div_ps(_mm256_loadu_ps(x + 8 * i), divisor);
    whole[i] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(value, _mm256_set1_ps(127)), _mm256_set1_ps(-127)));
  }
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(whole[0], whole[1]), 0xd8);
}

inline void store_quantized(int16_t *to, __m256i q) {
  q = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(q, 0xd8), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), q);
}

inline void store_quantized(int8_t *to, __m256i q) {
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
}

template <class Input>
inline __attribute__((always_inline)) float quantize_block(const float *x, int block, Input *q, int32_t *sums) {
  __m256i sizes = _mm256_setzero_si256(), total = sizes;
  for (int i = 0; i < block; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i));
    sizes = _mm256_max_epi32(sizes, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  const int32_t size = reduce(largest, sizes);
  const float scale = as_float(size) / 127;
  const bool finite = size < kInfinity;
  const __m256 divisor = _mm256_set1_ps(scale > 0 ? scale : 1);
  for (int i = 0; i < block; i += 16) {
    const __m256i whole = finite ? rounded(x + i, divisor) : _mm256_setzero_si256();
    total = _mm256_add_epi32(total, _mm256_madd_epi16(whole, _mm256_set1_epi16(1)));
    store_quantized(q + i, whole);
  }
  *sums = reduce(sum, total);
  return finite ? scale : as_float(kNan);
}

}  // namespace
