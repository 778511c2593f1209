#include <immintrin.h>

#include "attend.h"
#include "transpose_avx.h"

#ifdef REDRAFT_EMULATED
#include "emulated.h"
#endif

namespace {

struct Avx512 : AvxTranspose {
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Ints __attribute__((vector_size(64)));
  static constexpr int kLanes = 16, kMostRows = 12;
  static Floats widen(const Half *from) {
    // With a mask: GCC 12 warns of an uninitialized value in the intrinsic without one.
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
  }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
};

bool is_here() {
#ifdef REDRAFT_EMULATED
  return true;
#else
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("f16c");
#endif
}

}  // namespace

const Kernels redraft::attention::kAvx512 = {
    "avx512", is_here, Attend<Avx512>::write, Attend<Avx512>::attend, Attend<Avx512>::merge, Attend<Avx512>::gate};
