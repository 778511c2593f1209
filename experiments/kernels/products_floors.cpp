// Floors of a product's time: a plain read of its bytes, and its multiplications in registers alone.

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

// Reads `words` words of 64 bits, a multiple of 8. Without the loads ahead, a core may read a tenth less.
uint64_t read_all(const uint64_t *from, int64_t words) {
  constexpr int64_t kAhead = 768;
  uint64_t found[8] = {};
  for (int64_t i = 0; i < words; i += 8) {
    __builtin_prefetch(from + i + kAhead, 0, 2);
    for (int j = 0; j < 8; ++j) found[j] |= from[i + j];
  }
  for (int j = 1; j < 8; ++j) found[0] |= found[j];
  return found[0];
}

// Multiplies and adds `rounds` times in registers, as the kernel for `bits` does. Returns the multiplications of a
// round, or 0 if it has none for this machine.
int64_t multiply_all(int bits, int64_t rounds) {
#if defined(__AVX512VNNI__)
  __m512i sums[12], a = _mm512_set1_epi32(bits), b = a;
  for (auto &sum : sums) sum = a;
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto &sum : sums) __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b));
  }
  for (auto &sum : sums) __asm__ volatile("" : : "v"(sum));
  return 12 * 64;
#elif defined(__AVXVNNI__)
  __m256i sums[12], a = _mm256_set1_epi32(bits), b = a;
  for (auto &sum : sums) sum = a;
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto &sum : sums) __asm__("%{vex%} vpdpbusd %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b));
  }
  for (auto &sum : sums) __asm__ volatile("" : : "x"(sum));
  return 12 * 32;
#elif defined(__AVX2__)
  // The registers by name: the compiler keeps a sum in memory, which then sets the pace.
#define REDRAFT_SUMS(multiply, add)                                                                                    \
  __asm__ volatile(".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\n\t" multiply " %%ymm13, %%ymm14, %%ymm12\n\t" add    \
                   " %%ymm12, %%ymm\\n, %%ymm\\n\n\t.endr"                                                             \
                   :                                                                                                   \
                   :                                                                                                   \
                   : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", \
                     "ymm12")
  if (bits == 8) {
    for (int64_t i = 0; i < rounds; ++i) REDRAFT_SUMS("vpmaddwd", "vpaddd");
  } else {
    for (int64_t i = 0; i < rounds; ++i) REDRAFT_SUMS("vpmaddubsw", "vpaddw");
  }
  return 12 * (bits == 8 ? 16 : 32);
#else
  return bits * rounds * 0;
#endif
}
}
