// AVX-VNNI: vpdpbusd on 32 bytes.

#include "dot.h"
#include "multiply.h"
#include "ymm.h"

#ifdef REDRAFT_EMULATED
#include "emulated.h"
#endif

namespace {

struct AvxVnni : Ymm {
  using One = AvxVnni;
  template <int kBits>
  using Input = int8_t;

  static Ints dot(Ints sums, Ints codes, Ints q) { return _mm256_dpbusd_avx_epi32(sums, codes, q); }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
                           int block, const uint8_t *later) {
    add_dots<AvxVnni, kBits, kRows>(sums, codes, apart, q, block, later);
  }
};

bool is_here() {
#ifdef REDRAFT_EMULATED
  return true;
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avxvnni");
#endif
}

}  // namespace

const Kernels redraft::products::kAvxVnni = {"avx_vnni", is_here, scratch_bytes<AvxVnni>, quantize<AvxVnni>,
                                             multiply<AvxVnni>};
