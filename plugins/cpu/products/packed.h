// The packed form of a matrix: this header, then tiles of 16 columns (outputs), the last one padded with zeros.
//
// A tile has for each block of inputs
//   codes   units of 64 bytes, 4 for each column: one byte an input, or with 4 bits inputs 0 .. 3 of 8 in the low halves
//           of the bytes and inputs 4 .. 7 in the high halves
//   scales  16 fp32
// and then, if the matrix has zero points, 16 bytes for each block.

#pragma once

#include <stdint.h>

namespace redraft::products {

constexpr int64_t kColumns = 16;
constexpr int64_t kLine = 64;  // bytes of a cache line, and of a unit
constexpr int64_t kMostInBlock = 256;

struct Packed {
  int64_t n, k;
  int64_t blocks, tiles;
  int64_t block_bytes, tile_bytes;  // of one tile; block_bytes: codes and scales
  int32_t bits, block;
  int32_t has_zero_points, unused;

  const uint8_t *tile(int64_t number) const {
    return reinterpret_cast<const uint8_t *>(this + 1) + number * tile_bytes;
  }
};
static_assert(sizeof(Packed) == kLine, "tiles begin at a cache line");

// The functions of one instruction set.
struct Kernels {
  const char *isa;
  bool (*is_here)();  // on this CPU
  int64_t (*scratch_bytes)(const Packed &, int64_t rows);
  void (*quantize)(const Packed &, const float *x, int64_t rows, int64_t first, int64_t last, uint8_t *scratch);
  void (*multiply)(const Packed &, const uint8_t *scratch, int64_t rows, const float *bias, float *y, int64_t first,
                   int64_t last);
};

extern const Kernels kAmx, kAvx512Vnni, kAvxVnni, kAvx2, kNeonI8mm, kNeonDot, kScalar;

}  // namespace redraft::products
