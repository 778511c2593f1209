// Rows in groups that share one pass over a tile's weights. Everything is local to the file that includes this, since
// each is compiled for another instruction set.

#pragma once

#include <stdint.h>

namespace {

// Groups of almost equal size: the first `larger` have `size` + 1 rows, the others `size`.
struct Groups {
  int64_t count, size, larger;

  Groups(int64_t rows, int64_t most)
      : count(rows > most ? (rows + most - 1) / most : 1), size(rows / count), larger(rows % count) {}

  int64_t first_row(int64_t group) const { return group * size + (group < larger ? group : larger); }
  int64_t rows(int64_t group) const { return size + (group < larger ? 1 : 0); }
  int64_t of(int64_t row) const {
    const int64_t in_larger = larger * (size + 1);
    return row < in_larger ? row / (size + 1) : larger + (row - in_larger) / size;
  }
};

}  // namespace
