#include <immintrin.h>

#include "attend.h"
#include "transpose_avx.h"

namespace {

struct Avx2 : AvxTranspose {
  typedef float Floats __attribute__((vector_size(32)));
  typedef uint32_t Ints __attribute__((vector_size(32)));
  static constexpr int kLanes = 8, kMostRows = 6;
  static Floats widen(const Half *from) { return eight(from); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
};

bool is_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const Kernels redraft::attention::kAvx2 = {
    "avx2", is_here, Attend<Avx2>::write, Attend<Avx2>::attend, Attend<Avx2>::merge, Attend<Avx2>::gate};
