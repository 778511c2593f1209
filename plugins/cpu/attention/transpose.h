// 8 rows of 8 numbers as columns, in plain C++.

#pragma once

#include <stdint.h>

namespace {

struct Transpose {
  // Writes number first + i of row r to to[16 i + r], i < 8, r < 8.
  static void transpose(const float *const *rows, int64_t first, float *to) {
    for (int row = 0; row < 8; ++row) {
      for (int i = 0; i < 8; ++i) to[16 * i + row] = rows[row][first + i];
    }
  }
};

}  // namespace
