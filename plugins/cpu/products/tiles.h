// AMX's instructions on its tile registers 0 .. 7, by number. A row of a tile has up to 64 bytes.

#pragma once

#include <stdint.h>

namespace {

// What ldtilecfg loads: rows and their bytes of each register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, zero[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace

#ifdef REDRAFT_EMULATED
#include "emulated_tiles.h"
#else

namespace {

// Returns the thread's shapes, which may be another library's.
inline TileShapes begin_tiles(const TileShapes &shapes) {
  TileShapes before;
  __asm__ volatile("sttilecfg %0" : "=m"(before));
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
  return before;
}

inline void end_tiles(const TileShapes &before) {
  if (before.palette != 0) {
    __asm__ volatile("ldtilecfg %0" : : "m"(before));
  } else {
    __asm__ volatile("tilerelease");
  }
}

template <int kTile>
void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
void load_tile(const void *from, int64_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(kTile) : "memory");
}

template <int kTile>
void store_tile(void *to, int64_t row_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}

// sums[row][column] += signed[row][4 i + j] * bytes[i][4 column + j] for all i and j
template <int kSums, int kSigned, int kBytes>
void add_tile_products() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kSigned), "i"(kBytes));
}

}  // namespace

#endif
