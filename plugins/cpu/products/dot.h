// A block's products where an instruction adds the products of 4 bytes to a lane: Isa::dot(sums, codes, q).

#pragma once

#include <stdint.h>

namespace {

template <class Isa, int kBits, int kRows>
void add_dots(typename Isa::Ints (&sums)[kRows][Isa::kVectors], const uint8_t *codes, const uint8_t *q, int block) {
  constexpr int kBytes = 64 / Isa::kVectors, kHalves = 8 / kBits;
  for (int input = 0; input < block; input += 4 * kHalves) {
    for (int half = 0; half < kHalves; ++half) {
      for (int v = 0; v < Isa::kVectors; ++v) {
        auto bytes = Isa::load_bytes(codes + v * kBytes);
        if (kBits == 4) bytes = half == 0 ? Isa::low_halves(bytes) : Isa::high_halves(bytes);
        for (int row = 0; row < kRows; ++row) sums[row][v] = Isa::dot(sums[row][v], bytes, q + 4 * row);
      }
      q += 4 * kRows;
    }
    codes += 64;
  }
}

}  // namespace
