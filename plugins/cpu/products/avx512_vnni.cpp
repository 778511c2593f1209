// AVX-512 VNNI: vpdpbusd on 64 bytes.

#include "dot.h"
#include "multiply.h"
#include "zmm.h"

namespace {

template <int kTileCount>
struct Avx512Vnni : Zmm {
  using One = Avx512Vnni<1>;
  static constexpr int kTiles = kTileCount, kVectors = kTiles, kMostRows = 8;

  // The compiler would copy sums in loops.
  static Ints dot(Ints sums, Ints codes, Ints q) {
#ifdef REDRAFT_EMULATED
    return _mm512_dpbusd_epi32(sums, codes, q);
#else
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(q));
    return sums;
#endif
  }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
                           int block, const uint8_t *later) {
    add_dots<Avx512Vnni, kBits, kRows>(sums, codes, apart, q, block, later);
  }
};

using Pair = Avx512Vnni<2>;

bool is_here() {
#ifdef REDRAFT_EMULATED
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vnni");
#endif
}

}  // namespace

const Kernels redraft::products::kAvx512Vnni = {"avx512_vnni", is_here, scratch_bytes<Pair>, quantize<Pair>,
                                                multiply<Pair>};
