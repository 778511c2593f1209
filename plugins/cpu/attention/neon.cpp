#include <arm_neon.h>

#include "attend.h"
#include "transpose.h"

namespace {

struct Neon : Transpose {
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Ints __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kMostRows = 6;
  static Floats widen(const Half *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))); }
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
};

bool is_here() { return true; }

}  // namespace

const Kernels redraft::attention::kNeon = {
    "neon", is_here, Attend<Neon>::write, Attend<Neon>::attend, Attend<Neon>::merge, Attend<Neon>::gate};
