// ARM's dot product of signed bytes: codes are multiplied less 128, and so are zero points.

#include <sys/auxv.h>

#include "dot.h"
#include "multiply.h"
#include "neon.h"

namespace {

struct NeonDot : Neon {
  using One = NeonDot;
  static constexpr int kMostRows = 4;

  static int32_t zero_code(int32_t code) { return code - 128; }
  static Ints zero_points(const uint8_t *from) { return vsubq_s32(Neon::zero_points(from), ints(128)); }

  static Ints dot(Ints sums, uint8x16_t codes, Ints q) {
    const int8x16_t less_128 = vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(128)));
    return vdotq_s32(sums, less_128, vreinterpretq_s8_s32(q));
  }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
                           int block, const uint8_t *later) {
    add_dots<NeonDot, kBits, kRows>(sums, codes, apart, q, block, later);
  }
};

bool is_here() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

}  // namespace

const Kernels redraft::products::kNeonDot = {"neon_dot", is_here, scratch_bytes<NeonDot>, quantize<NeonDot>,
                                             multiply<NeonDot>};
