// Writes the packed form (packed.h).

#include <string.h>

#include "packed.h"
#include "products.h"

namespace redraft::products {
namespace {

constexpr int64_t kMostSize = int64_t{1} << 31;
constexpr int64_t kScaleBytes = kColumns * sizeof(float);

bool is_known(const redraft_block_matrix &m) {
  return m.n > 0 && m.k > 0 && m.n < kMostSize && m.k < kMostSize && (m.bits == 4 || m.bits == 8) && m.block >= 16 &&
         m.block <= kMostInBlock && (m.block & (m.block - 1)) == 0;
}

Packed header(const redraft_block_matrix &m) {
  Packed packed{};
  packed.n = m.n;
  packed.k = m.k;
  packed.blocks = (m.k + m.block - 1) / m.block;
  packed.tiles = (m.n + kColumns - 1) / kColumns;
  packed.block_bytes = kColumns * m.block * m.bits / 8 + kScaleBytes;
  packed.tile_bytes = packed.blocks * packed.block_bytes;
  if (m.zero_points != nullptr) packed.tile_bytes += (packed.blocks * kColumns + kLine - 1) / kLine * kLine;
  packed.bits = m.bits;
  packed.block = m.block;
  packed.has_zero_points = m.zero_points != nullptr;
  return packed;
}

// Moves the low four halves of bytes to the low halves of four bytes.
uint32_t spread(uint32_t halves) {
  halves = (halves | halves << 8) & 0x00ff00ff;
  return (halves | halves << 4) & 0x0f0f0f0f;
}

void pack_column(const redraft_block_matrix &m, const Packed &packed, int64_t column, uint8_t *tile) {
  const int64_t bytes = m.block * m.bits / 8, place = column % kColumns * 4;
  const uint8_t *codes = m.codes + column * packed.blocks * bytes;
  for (int64_t block = 0; block < packed.blocks; ++block, codes += bytes) {
    uint8_t *to = tile + block * packed.block_bytes;
    for (int64_t i = 0; i < bytes; i += 4, to += kLine) {
      uint32_t four;
      memcpy(&four, codes + i, 4);
      if (m.bits == 4) four = spread(four & 0xffff) | spread(four >> 16) << 4;
      memcpy(to + place, &four, 4);
    }
    memcpy(to + place, m.scales + column * packed.blocks + block, 4);
  }
  if (m.zero_points == nullptr) return;
  const int64_t in_byte = 8 / m.bits, row = (packed.blocks + in_byte - 1) / in_byte;
  uint8_t *to = tile + packed.blocks * packed.block_bytes + column % kColumns;
  for (int64_t block = 0; block < packed.blocks; ++block, to += kColumns) {
    const uint32_t byte = m.zero_points[column * row + block / in_byte];
    *to = static_cast<uint8_t>(byte >> block % in_byte * m.bits & ((1u << m.bits) - 1));
  }
}

}  // namespace
}  // namespace redraft::products

using namespace redraft::products;

int64_t redraft_products_packed_bytes(const redraft_block_matrix *matrix) {
  if (!is_known(*matrix)) return 0;
  const Packed packed = header(*matrix);
  return kLine + packed.tiles * packed.tile_bytes;
}

int redraft_products_pack(const redraft_block_matrix *matrix, void *packed) {
  const int64_t size = redraft_products_packed_bytes(matrix);
  if (size == 0 || matrix->codes == nullptr || matrix->scales == nullptr) return 1;
  const Packed head = header(*matrix);
  auto *tiles = static_cast<uint8_t *>(packed) + kLine;
  memcpy(packed, &head, kLine);
  if (head.n % kColumns != 0 || head.has_zero_points) memset(tiles, 0, size - kLine);
  for (int64_t column = 0; column < head.n; ++column) {
    pack_column(*matrix, head, column, tiles + column / kColumns * head.tile_bytes);
  }
  return 0;
}
