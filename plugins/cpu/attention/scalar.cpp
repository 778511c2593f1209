// Plain C++, for CPUs without any of the instruction sets.

#include "attend.h"
#include "transpose.h"

namespace {

struct Scalar : Transpose {
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Ints __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kMostRows = 2;
  static Floats widen(const Half *from) {
    return Floats{widened(from[0]), widened(from[1]), widened(from[2]), widened(from[3])};
  }
  static Floats fma(Floats a, Floats b, Floats c) {
    return Floats{fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
  }
};

bool is_here() { return true; }

}  // namespace

const Kernels redraft::attention::kScalar = {
    "scalar", is_here, Attend<Scalar>::write, Attend<Scalar>::attend, Attend<Scalar>::merge, Attend<Scalar>::gate};
