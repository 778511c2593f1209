// The loops over tiles, groups of rows and blocks. Isa gives vectors of int32 and fp32, kVectors to a tile, and
//
//   Input<kBits>   int8_t or int16_t: what q is stored as (quantize.h)
//   add_products<kBits, kRows>(sums, codes, q, block)   adds code * q over a block's inputs to sums[row][vector]
//
// The file that includes this is compiled for one instruction set, so everything is local to it.

#pragma once

#include <stdint.h>
#include <string.h>

#include "groups.h"
#include "packed.h"
#include "quantize.h"

namespace {

using redraft::products::kColumns;
using redraft::products::Kernels;
using redraft::products::kLine;

constexpr int64_t kPanelBytes = 256 << 10;  // of activations that stay in a cache while all tiles pass
constexpr int64_t kLeastPanelRows = 32;     // that share one pass over the weights in memory

inline int32_t load_int(const uint8_t *from) {
  int32_t value;
  memcpy(&value, from, sizeof value);
  return value;
}

inline float load_float(const uint8_t *from) {
  float value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Lines of each block of the next tile that a group loads into the cache: `first`, then every `step` bytes.
struct Ahead {
  int64_t first, step;
};

// Products of kRows rows of quantized activations with a tile.
template <class Isa, int kBits, int kRows>
void multiply_group(const Packed &m, const uint8_t *tile, const uint8_t *q, Ahead ahead, float (*y)[kColumns]) {
  constexpr int kLanes = kColumns / Isa::kVectors;
  const int64_t codes = m.block_bytes - kColumns * static_cast<int64_t>(sizeof(float));
  const uint8_t *zero_points = tile + m.blocks * m.block_bytes;
  typename Isa::Floats total[kRows][Isa::kVectors];
  for (auto &row : total) {
    for (auto &each : row) each = Isa::floats(0);
  }
  for (int64_t block = 0; block < m.blocks; ++block) {
    for (int64_t line = ahead.first; line < m.block_bytes; line += ahead.step) {
      __builtin_prefetch(tile + m.tile_bytes + line, 0, 2);
    }
    typename Isa::Ints sums[kRows][Isa::kVectors];
    for (int v = 0; v < Isa::kVectors; ++v) {
      const auto zero = m.has_zero_points ? Isa::zero_points(zero_points + v * kLanes)  //
                                          : Isa::zero_point(1 << (kBits - 1));
      for (int row = 0; row < kRows; ++row) {
        sums[row][v] = Isa::times(zero, Isa::ints(load_int(q + 4 * (kRows + row))));
      }
    }
    Isa::template add_products<kBits, kRows>(sums, tile, q + 8 * kRows, m.block);
    for (int v = 0; v < Isa::kVectors; ++v) {
      const auto scales = Isa::load_floats(tile + codes + v * kLanes * 4);
      for (int row = 0; row < kRows; ++row) {
        const auto scale = Isa::times(scales, Isa::floats(load_float(q + 4 * row)));
        total[row][v] = Isa::fma(scale, Isa::to_floats(sums[row][v]), total[row][v]);
      }
    }
    tile += m.block_bytes;
    zero_points += kColumns;
    q += kRows * (8 + m.block * static_cast<int64_t>(sizeof(typename Isa::template Input<kBits>)));
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < Isa::kVectors; ++v) Isa::store(y[row] + v * kLanes, total[row][v]);
  }
}

using Multiply = void (*)(const Packed &, const uint8_t *tile, const uint8_t *q, Ahead, float (*y)[kColumns]);

template <class Isa, int kBits, int kRows = Isa::kMostRows>
Multiply function_for(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return function_for<Isa, kBits, kRows - 1>(rows);
  }
  return multiply_group<Isa, kBits, kRows>;
}

template <class Isa, int kBits>
void multiply_tiles(const Packed &m, const uint8_t *scratch, int64_t rows, const float *bias, float *y, int64_t first,
                    int64_t last) {
  const Groups groups(rows, Isa::kMostRows);
  const Multiply smaller = function_for<Isa, kBits>(groups.size), larger = function_for<Isa, kBits>(groups.size + 1);
  const int64_t bytes = row_bytes<typename Isa::template Input<kBits>>(m);
  int64_t panel_rows = kPanelBytes / bytes;
  if (panel_rows < kLeastPanelRows) panel_rows = kLeastPanelRows;
  const int64_t panel = (panel_rows + Isa::kMostRows - 1) / Isa::kMostRows;
  for (int64_t begin = 0; begin < groups.count; begin += panel) {
    const int64_t end = begin + panel < groups.count ? begin + panel : groups.count;
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t columns = tile < m.tiles - 1 ? kColumns : m.n - tile * kColumns;
      for (int64_t group = begin; group < end; ++group) {
        const int64_t row = groups.first_row(group);
        const Ahead ahead{tile + 1 < last ? (group - begin) * kLine : m.block_bytes, (end - begin) * kLine};
        alignas(kLine) float found[Isa::kMostRows][kColumns];
        (group < groups.larger ? larger : smaller)(m, m.tile(tile), scratch + row * bytes, ahead, found);
        for (int64_t i = 0; i < groups.rows(group); ++i) {
          float *to = y + (row + i) * m.n + tile * kColumns;
          for (int64_t c = 0; c < columns; ++c) {
            to[c] = bias == nullptr ? found[i][c] : found[i][c] + bias[tile * kColumns + c];
          }
        }
      }
    }
  }
}

template <class Isa>
int64_t scratch_bytes(const Packed &m, int64_t rows) {
  using Byte = typename Isa::template Input<8>;
  using Half = typename Isa::template Input<4>;
  return rows * (m.bits == 8 ? row_bytes<Byte>(m) : row_bytes<Half>(m));
}

template <class Isa>
void quantize(const Packed &m, const float *x, int64_t rows, int64_t first, int64_t last, uint8_t *scratch) {
  const Groups groups(rows, Isa::kMostRows);
  const auto quantize_one = m.bits == 8 ? quantize_row<typename Isa::template Input<8>>  //
                                        : quantize_row<typename Isa::template Input<4>>;
  for (int64_t row = first; row < last; ++row) {
    const int64_t group = groups.of(row), begin = groups.first_row(group);
    uint8_t *to = scratch + scratch_bytes<Isa>(m, begin);
    quantize_one(m, x + row * m.k, to, groups.rows(group), row - begin);
  }
}

template <class Isa>
void multiply(const Packed &m, const uint8_t *scratch, int64_t rows, const float *bias, float *y, int64_t first,
              int64_t last) {
  if (rows == 0) return;
  const auto run = m.bits == 8 ? multiply_tiles<Isa, 8> : multiply_tiles<Isa, 4>;
  run(m, scratch, rows, bias, y, first, last);
}

}  // namespace
