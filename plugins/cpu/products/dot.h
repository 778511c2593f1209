// A block's products where an instruction adds the products of 4 bytes to a lane: Isa::dot(sums, codes, q).

#pragma once

#include <stdint.h>

#include "later.h"

namespace {

template <class Isa, int kBits, int kRows>
void add_dots(typename Isa::Ints (&sums)[kRows][Isa::kVectors], const uint8_t *codes, int64_t apart, const uint8_t *q,
              int block, const uint8_t *later) {
  constexpr int kHalves = 8 / kBits;
#pragma GCC unroll 8
  for (int input = 0; input < block; input += 4 * kHalves) {
    for (int of = 0; of < Isa::kTiles; ++of) load_later(later + of * apart);
    for (int half = 0; half < kHalves; ++half) {
      decltype(Isa::load_bytes(codes)) bytes[Isa::kVectors];
      for (int v = 0; v < Isa::kVectors; ++v) {
        bytes[v] = Isa::load_bytes(codes + v * apart);
        if (kBits == 4) bytes[v] = half == 0 ? Isa::low_halves(bytes[v]) : Isa::high_halves(bytes[v]);
      }
      for (int row = 0; row < kRows; ++row) {
        const auto four = Isa::inputs(q + 4 * row);
        for (int v = 0; v < Isa::kVectors; ++v) sums[row][v] = Isa::dot(sums[row][v], bytes[v], four);
      }
      q += 4 * kRows;
    }
    codes += 64;
    later += 64;
  }
}

}  // namespace
