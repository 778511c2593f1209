// 8 rows of 8 numbers as columns in fp32, in plain C++.

#pragma once

#include "half.h"

namespace {

struct Transpose {
  // Writes number first + i of row r to to[16 i + r], i < 8, r < 8.
  template <typename Number>
  static void transpose(const Number *const *rows, int64_t first, float *to) {
    for (int row = 0; row < 8; ++row) {
      for (int i = 0; i < 8; ++i) to[16 * i + row] = widened(rows[row][first + i]);
    }
  }
};

}  // namespace
