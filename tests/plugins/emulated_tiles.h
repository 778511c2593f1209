// AMX's instructions (products/tiles.h) on plain arrays, for CPUs that lack them.

#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

inline thread_local TileShapes shapes;
inline thread_local uint8_t tiles[8][16][64];

}  // namespace emulated

static inline TileShapes begin_tiles(const TileShapes &shapes) {
  const TileShapes before = emulated::shapes;
  emulated::shapes = shapes;
  return before;
}

static inline void end_tiles(const TileShapes &before) { emulated::shapes = before; }

template <int kTile>
static void zero_tile() {
  std::memset(emulated::tiles[kTile], 0, sizeof emulated::tiles[kTile]);
}

template <int kTile>
static void load_tile(const void *from, int64_t row_bytes) {
  for (int row = 0; row < emulated::shapes.rows[kTile]; ++row) {
    const auto *bytes = static_cast<const uint8_t *>(from) + row * row_bytes;
    std::memcpy(emulated::tiles[kTile][row], bytes, emulated::shapes.bytes[kTile]);
  }
}

template <int kTile>
static void store_tile(void *to, int64_t row_bytes) {
  for (int row = 0; row < emulated::shapes.rows[kTile]; ++row) {
    std::memcpy(static_cast<uint8_t *>(to) + row * row_bytes, emulated::tiles[kTile][row],
                emulated::shapes.bytes[kTile]);
  }
}

template <int kSums, int kSigned, int kBytes>
static void add_tile_products() {
  const TileShapes &shapes = emulated::shapes;
  for (int row = 0; row < shapes.rows[kSums]; ++row) {
    int32_t sums[16];
    std::memcpy(sums, emulated::tiles[kSums][row], sizeof sums);
    for (int k = 0; k < shapes.bytes[kSigned]; ++k) {
      const auto input = static_cast<int8_t>(emulated::tiles[kSigned][row][k]);
      const uint8_t *bytes = emulated::tiles[kBytes][k / 4] + k % 4;
      for (int column = 0; column < 16; ++column) sums[column] += input * bytes[4 * column];
    }
    std::memcpy(emulated::tiles[kSums][row], sums, sizeof sums);
  }
}
