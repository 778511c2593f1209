// ARM's products of matrices: usmmla multiplies 2 columns of 8 unsigned codes with 2 rows of 8 signed inputs. One row takes
// usdot, which needs no codes in another order.

#include <sys/auxv.h>

#include "dot.h"
#include "later.h"
#include "multiply.h"
#include "neon.h"

namespace {

struct NeonI8mm : Neon {
  using One = NeonI8mm;
  static constexpr int kMostRows = 4;

  static Ints dot(Ints sums, uint8x16_t codes, Ints q) { return vusdotq_s32(sums, codes, vreinterpretq_s8_s32(q)); }

  // 4 inputs of two rows, or of one row twice.
  static Ints pair(const uint8_t *q, bool two) {
    if (!two) return inputs(q);
    int64_t both;
    memcpy(&both, q, sizeof both);
    return vreinterpretq_s32_s64(vdupq_n_s64(both));
  }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
                           int block, const uint8_t *later) {
    if constexpr (kRows == 1) return add_dots<NeonI8mm, kBits, kRows>(sums, codes, apart, q, block, later);
    constexpr int kPairs = (kRows + 1) / 2;  // if kRows is odd, the last row is its own partner
    Ints products[kPairs][2 * kVectors];     // of rows a and b with columns 0 and 1: 0a, 0b, 1a, 1b
    for (int pair = 0; pair < kPairs; ++pair) {
      const Ints *a = sums[2 * pair], *b = sums[2 * pair + (2 * pair + 1 < kRows)];
      for (int v = 0; v < kVectors; ++v) {
        products[pair][2 * v] = vzip1q_s32(a[v], b[v]);
        products[pair][2 * v + 1] = vzip2q_s32(a[v], b[v]);
      }
    }
    for (int input = 0; input < block; input += 8, codes += 16 * kBits, later += 16 * kBits, q += 8 * kRows) {
      load_later(later);
      if (kBits == 8) load_later(later + 64);
      int8x16_t rows[kPairs];
      for (int number = 0; number < kPairs; ++number) {
        const bool two = 2 * number + 1 < kRows;
        const Ints first = pair(q + 8 * number, two), second = pair(q + 8 * number + 4 * kRows, two);
        rows[number] = vreinterpretq_s8_s32(vzip1q_s32(first, second));
      }
      for (int v = 0; v < kVectors; ++v) {
        const uint8x16_t bytes = load_bytes(codes + 16 * v);
        const auto first = vreinterpretq_u32_u8(kBits == 8 ? bytes : low_halves(bytes));
        const auto second = vreinterpretq_u32_u8(kBits == 8 ? load_bytes(codes + 16 * v + 64) : high_halves(bytes));
        const auto low = vreinterpretq_u8_u32(vzip1q_u32(first, second));
        const auto high = vreinterpretq_u8_u32(vzip2q_u32(first, second));
        for (int pair = 0; pair < kPairs; ++pair) {
          products[pair][2 * v] = vusmmlaq_s32(products[pair][2 * v], low, rows[pair]);
          products[pair][2 * v + 1] = vusmmlaq_s32(products[pair][2 * v + 1], high, rows[pair]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int v = 0; v < kVectors; ++v) {
        const Ints low = products[row / 2][2 * v], high = products[row / 2][2 * v + 1];
        sums[row][v] = row % 2 ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high);
      }
    }
  }
};

bool is_here() {
  constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2_I8MM, which older headers lack
  return (getauxval(AT_HWCAP2) & kI8mm) != 0;
}

}  // namespace

const Kernels redraft::products::kNeonI8mm = {"neon_i8mm", is_here, scratch_bytes<NeonI8mm>, quantize<NeonI8mm>,
                                              multiply<NeonI8mm>};
