// Plain C++, for CPUs without any of the instruction sets.

#include <cmath>

#include "dot.h"
#include "multiply.h"

namespace {

struct Scalar {
  using One = Scalar;
  using Ints = int32_t;
  using Floats = float;
  struct Bytes {
    uint8_t of[4];
  };
  template <int kBits>
  using Input = int8_t;
  using Registers = AnyRegisters;
  static constexpr int kUnit = 4, kLeastRows = 1, kTiles = 1, kVectors = 16, kMostRows = 4;

  static Ints ints(int32_t value) { return value; }
  static int32_t zero_code(int32_t code) { return code; }
  static Ints zero_points(const uint8_t *from) { return *from; }
  static Floats floats(float value) { return value; }
  static Floats load_floats(const void *from) { return load_float(static_cast<const uint8_t *>(from)); }
  static Floats to_floats(Ints values) { return static_cast<float>(values); }
  static void store(float *to, Floats values) { *to = values; }
  static Ints times(Ints a, Ints b) { return a * b; }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats fma(Floats a, Floats b, Floats c) { return std::fma(a, b, c); }

  static Bytes load_bytes(const uint8_t *from) { return {{from[0], from[1], from[2], from[3]}}; }
  static Bytes low_halves(Bytes b) { return {{low(b.of[0]), low(b.of[1]), low(b.of[2]), low(b.of[3])}}; }
  static Bytes high_halves(Bytes b) { return {{high(b.of[0]), high(b.of[1]), high(b.of[2]), high(b.of[3])}}; }
  static uint8_t low(uint8_t byte) { return byte & 15; }
  static uint8_t high(uint8_t byte) { return byte >> 4; }

  static const uint8_t *inputs(const uint8_t *q) { return q; }

  static Ints dot(Ints sum, Bytes codes, const uint8_t *q) {
    for (int i = 0; i < 4; ++i) sum += codes.of[i] * static_cast<int8_t>(q[i]);
    return sum;
  }

  template <int kBits, int kRows>
  static void add_products(Ints (&sums)[kRows][kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
                           int block, const uint8_t *later) {
    add_dots<Scalar, kBits, kRows>(sums, codes, apart, q, block, later);
  }
};

}  // namespace

const Kernels redraft::products::kScalar = {"scalar", [] { return true; }, scratch_bytes<Scalar>, quantize<Scalar>,
                                            multiply<Scalar>};
