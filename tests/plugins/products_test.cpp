// Every instruction set of this CPU and build against plain C++, to the bit, for CPUs that only an emulator has. Prints
// the names, or the first difference.

#include "../../plugins/cpu/products/products.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

namespace {

std::mt19937 generator;

template <class T>
std::vector<T> random_values(int64_t count) {
  std::vector<T> values(count);
  for (auto &each : values) {
    if (sizeof(T) == 1) {
      each = static_cast<T>(generator());
    } else {
      each = static_cast<T>(std::normal_distribution<float>()(generator));
    }
  }
  return values;
}

struct Aligned {
  explicit Aligned(int64_t size) : memory(static_cast<uint8_t *>(aligned_alloc(64, (size + 63) / 64 * 64))) {}
  ~Aligned() { free(memory); }
  uint8_t *memory;
};

std::vector<float> product(const void *packed, const std::vector<float> &x, int64_t rows, int64_t n) {
  const Aligned scratch(redraft_products_scratch_bytes(packed, rows));
  std::vector<float> y(rows * n);
  redraft_products_quantize(packed, x.data(), rows, 0, rows, scratch.memory);
  redraft_products_multiply(packed, scratch.memory, rows, nullptr, y.data(), 0, redraft_products_tiles(packed));
  return y;
}

bool same(float a, float b) { return a != a ? b != b : memcmp(&a, &b, sizeof a) == 0; }

bool equals_scalar(const char *isa, int bits, int block, int64_t rows, bool zeros) {
  const int64_t n = 37, k = 3 * block + 5, blocks = 4;
  const auto codes = random_values<uint8_t>(n * blocks * block), zero_points = random_values<uint8_t>(n * blocks);
  auto scales = random_values<float>(n * blocks), x = random_values<float>(rows * k);
  x[0] = rows % 3 ? 1e38f : 1e-45f;
  if (rows > 2) x[2 * k + 1] = rows % 2 ? HUGE_VALF : -NAN;
  const redraft_block_matrix matrix = {
      n, k, bits, block, codes.data(), scales.data(), zeros ? zero_points.data() : nullptr};
  const Aligned packed(redraft_products_packed_bytes(&matrix));
  if (redraft_products_pack(&matrix, packed.memory) != 0) return false;
  redraft_products_use("scalar");
  const auto expected = product(packed.memory, x, rows, n);
  redraft_products_use(isa);
  const auto found = product(packed.memory, x, rows, n);
  for (int64_t i = 0; i < rows * n; ++i) {
    if (same(found[i], expected[i])) continue;
    printf("%s, %d bits, blocks of %d, %d rows, output %d: expected %a, found %a\n", isa, bits, block,
           static_cast<int>(rows), static_cast<int>(i), expected[i], found[i]);
    return false;
  }
  return true;
}

}  // namespace

int main() {
  for (const char *isa : {"avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dot"}) {
    if (redraft_products_use(isa) != 0) continue;
    for (int bits = 4; bits <= 8; bits += 4) {
      for (int block = 16; block <= 256; block *= 2) {
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 34}) {
          if (!equals_scalar(isa, bits, block, rows, rows % 2 == 0)) return 1;
        }
      }
    }
    puts(isa);
  }
}
