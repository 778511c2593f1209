// The loops over tiles, groups of rows and blocks. Isa gives vectors of int32 and fp32, kVectors to the kTiles tiles that it
// multiplies together, Isa::One for a last tile alone, and
//
//   Input<kBits>      int8_t or int16_t: what q is stored as (quantize.h)
//   zero_code(code)   the zero point of all codes, as `zero_points` would give it
//   add_products<kBits, kRows>(sums, codes, apart, q, block, later)
//                     adds code * q over a block's inputs to sums[row][vector], whose codes are `apart` bytes from the next
//                     vector's, and loads the lines at `later`, one for each line of codes
//
// The file that includes this is compiled for one instruction set, so everything is local to it.

#pragma once

#include <stdint.h>
#include <string.h>

#include "groups.h"
#include "later.h"
#include "packed.h"
#include "quantize.h"

namespace {

using redraft::products::kColumns;
using redraft::products::Kernels;
using redraft::products::kLine;

constexpr int64_t kScaleBytes = kColumns * static_cast<int64_t>(sizeof(float));
constexpr int64_t kMostPanelRows = 128;  // that share one pass over the weights in memory
constexpr int64_t kTurn = 256;           // inputs that a group multiplies before the next one's turn
constexpr int64_t kAhead = 6 << 10;      // bytes of weights that are loaded into the cache ahead of their use

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

// Registers that need no preparation.
struct AnyRegisters {
  AnyRegisters(int64_t /*rows of a group*/, int64_t /*block*/) {}
};

// The part of a tile, or of Isa::kTiles tiles, that a group of rows is multiplied with: its blocks first .. last - 1.
struct Part {
  const uint8_t *tile;
  int64_t first, last;
  bool loads;  // lines ahead of their use
};

// Adds products of kRows rows of quantized activations to `y`, or writes them if they are those of the first blocks.
// kBlock: the block, or 0 for any.
template <class Isa, int kBits, int kBlock, int kRows>
void multiply_group(const Packed &m, const Part &part, const uint8_t *q, float (*y)[Isa::kTiles * kColumns]) {
  constexpr int kVectors = Isa::kVectors, kLanes = Isa::kTiles * kColumns / kVectors;
  const int inputs = kBlock == 0 ? m.block : kBlock;
  const int64_t codes = kColumns * inputs * kBits / 8, block_bytes = codes + kScaleBytes;
  const int64_t q_bytes = kRows * (8 + inputs * static_cast<int64_t>(sizeof(typename Isa::template Input<kBits>)));
  const int64_t apart = Isa::kTiles == 1 ? kLine / kVectors : m.tile_bytes;  // of vectors
  const int64_t zeros_apart = Isa::kTiles == 1 ? kLanes : m.tile_bytes;
  const uint8_t *end = part.tile + m.tile_bytes, *tile = part.tile + part.first * block_bytes;
  const uint8_t *zero_points = part.tile + m.blocks * block_bytes + part.first * kColumns;
  q += part.first * q_bytes;
  typename Isa::Floats total[kRows][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      total[row][v] = part.first == 0 ? Isa::floats(0) : Isa::load_floats(y[row] + v * kLanes);
    }
  }
  for (int64_t block = part.first; block < part.last; ++block) {
    const uint8_t *later = part.loads ? tile + kAhead : tile;
    if (later >= end) later += (Isa::kTiles - 1) * m.tile_bytes;
    typename Isa::Ints sums[kRows][kVectors];
    if (m.has_zero_points) {
      for (int v = 0; v < kVectors; ++v) {
        const auto zero = Isa::zero_points(zero_points + v * zeros_apart);
        for (int row = 0; row < kRows; ++row) {
          sums[row][v] = Isa::times(zero, Isa::ints(load_int(q + 4 * (kRows + row))));
        }
      }
    } else {
      for (int row = 0; row < kRows; ++row) {
        for (auto &each : sums[row]) each = Isa::ints(load_int(q + 4 * (kRows + row)));
      }
    }
    Isa::template add_products<kBits, kRows>(sums, tile, apart, q + 8 * kRows, inputs, later);
    typename Isa::Floats scales[kVectors];
    for (int v = 0; v < kVectors; ++v) scales[v] = Isa::load_floats(tile + codes + v * apart);
    for (int of = 0; of < Isa::kTiles; ++of) load_later(later + codes + of * apart);
    for (int row = 0; row < kRows; ++row) {
      const auto row_scale = Isa::floats(load_float(q + 4 * row));
      for (int v = 0; v < kVectors; ++v) {
        total[row][v] = Isa::fma(Isa::times(scales[v], row_scale), Isa::to_floats(sums[row][v]), total[row][v]);
      }
    }
    tile += block_bytes;
    zero_points += kColumns;
    q += q_bytes;
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) Isa::store(y[row] + v * kLanes, total[row][v]);
  }
}

template <class Isa, int kBits, int kBlock, int kRows>
struct Group {
  static constexpr auto *multiply = multiply_group<Isa, kBits, kBlock, kRows>;
};

template <class Isa>
using Multiply = void (*)(const Packed &, const Part &, const uint8_t *q, float (*y)[Isa::kTiles * kColumns]);

template <class Isa, int kBits, int kRows = Isa::kMostRows>
Multiply<Isa> function_for(int64_t rows, int64_t block) {
  if constexpr (kRows > Isa::kLeastRows) {
    if (rows < kRows) return function_for<Isa, kBits, kRows - 1>(rows, block);
  }
  return block == 32 ? Group<Isa, kBits, 32, kRows>::multiply : Group<Isa, kBits, 0, kRows>::multiply;
}

// Writes one row of products with tiles.
template <int kCount>
void write(const float (&found)[kCount], const float *bias, int64_t columns, float *y) {
  if (bias == nullptr && columns >= kCount) {
    memcpy(y, found, sizeof found);
  } else {
    for (int64_t c = 0; c < columns && c < kCount; ++c) y[c] = bias == nullptr ? found[c] : found[c] + bias[c];
  }
}

// A panel of groups with tiles first .. last - 1, a multiple of Isa::kTiles. Several groups take turns after a few blocks,
// so that memory is never idle and the blocks stay in the first cache.
template <class Isa, int kBits>
void multiply_panel(const Packed &m, const uint8_t *scratch, const Groups &groups, int64_t begin, int64_t end,
                    const float *bias, float *y, int64_t first, int64_t last) {
  if (first == last) return;
  const Multiply<Isa> smaller = function_for<Isa, kBits>(groups.size, m.block);
  const Multiply<Isa> larger = function_for<Isa, kBits>(groups.size + 1, m.block);
  const int64_t bytes = row_bytes<typename Isa::template Input<kBits>>(m);
  const int64_t turn = end - begin == 1 ? m.blocks : (kTurn + m.block - 1) / m.block;
  alignas(kLine) float found[kMostPanelRows][Isa::kTiles * kColumns];
  [[maybe_unused]] const typename Isa::Registers registers(groups.size + (groups.larger > 0), m.block);
  for (int64_t tile = first; tile < last; tile += Isa::kTiles) {
    const int64_t column = tile * kColumns, from = groups.first_row(begin);
    for (int64_t block = 0; block < m.blocks; block += turn) {
      const int64_t until = block + turn < m.blocks ? block + turn : m.blocks;
      for (int64_t group = begin; group < end; ++group) {
        const int64_t row = groups.first_row(group);
        const Part part{m.tile(tile), block, until, group == begin};
        (group < groups.larger ? larger : smaller)(m, part, scratch + row * bytes, found + (row - from));
      }
    }
    for (int64_t row = from; row < groups.first_row(end); ++row) {
      write(found[row - from], bias == nullptr ? bias : bias + column, m.n - column, y + row * m.n + column);
    }
  }
}

template <class Isa, int kBits>
void multiply_tiles(const Packed &m, const uint8_t *scratch, int64_t rows, const float *bias, float *y, int64_t first,
                    int64_t last) {
  const Groups groups(rows, Isa::kMostRows);
  constexpr int64_t kPanel = kMostPanelRows / Isa::kMostRows;
  const int64_t rest = last - (last - first) % Isa::kTiles;
  for (int64_t begin = 0; begin < groups.count; begin += kPanel) {
    const int64_t end = begin + kPanel < groups.count ? begin + kPanel : groups.count;
    multiply_panel<Isa, kBits>(m, scratch, groups, begin, end, bias, y, first, rest);
    multiply_panel<typename Isa::One, kBits>(m, scratch, groups, begin, end, bias, y, rest, last);
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
  const int32_t factor = m.has_zero_points ? -1 : -Isa::zero_code(1 << (m.bits - 1));
  for (int64_t row = first; row < last; ++row) {
    const int64_t group = groups.of(row), begin = groups.first_row(group);
    uint8_t *to = scratch + scratch_bytes<Isa>(m, begin);
    quantize_one(m, x + row * m.k, factor, Isa::kUnit, to, groups.rows(group), row - begin);
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
