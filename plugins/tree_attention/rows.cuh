// Kernels that write new rows into the cache and make accepted rows contiguous. They copy bytes, 16 at a time.

#pragma once

#include "problem.cuh"

namespace redraft {

constexpr int kCopyThreads = 256;

struct Append {
  const Chunk *k;  // [B, T, Hkv * D], null: no rows to write
  const Chunk *v;
  Chunk *key_cache;  // [B, Hkv, C, D]
  Chunk *value_cache;
  const uint8_t *mask_bools;  // [B, T, T], null: no mask to pack
  uint32_t *mask_bits;        // [B, T, mask_words]
  int chunks;                 // of a row of one head
};

// Bits of nodes 32 w .. 32 w + 31 in one row of a mask of bytes.
REDRAFT_DEVICE uint32_t pack_mask(const uint8_t *row, int nodes, int word) {
  uint32_t bits = 0;
  for (int bit = 0; bit < kWarp && word * kWarp + bit < nodes; ++bit) {
    bits |= static_cast<uint32_t>(row[word * kWarp + bit] != 0) << bit;
  }
  return bits;
}

// k, v [B, T, Hkv D] -> rows cache_len .. cache_len + T - 1 of the caches; a mask of bytes -> a mask of bits. Moves
// 4 B T Hkv D elements, reads B T T bytes.
REDRAFT_GLOBAL(kCopyThreads) append(Problem problem, Append rows) {
  const int64_t stride = static_cast<int64_t>(block_count()) * kCopyThreads;
  const int64_t first = static_cast<int64_t>(block_index()) * kCopyThreads + thread_index();
  const int64_t nodes = static_cast<int64_t>(problem.batch) * problem.nodes;
  const int row_chunks = problem.kv_heads * rows.chunks;
  for (int64_t i = first; rows.k && i < nodes * row_chunks; i += stride) {
    const int sequence = static_cast<int>(i / row_chunks / problem.nodes);
    const int node = static_cast<int>(i / row_chunks % problem.nodes);
    const int head = static_cast<int>(i % row_chunks / rows.chunks);
    const Extent extent = extent_of(problem, sequence);
    if (extent.past + node >= extent.end) continue;
    const int64_t row =
        (static_cast<int64_t>(sequence) * problem.kv_heads + head) * problem.capacity + extent.past + node;
    const int64_t to = row * rows.chunks + i % rows.chunks;
    rows.key_cache[to] = rows.k[i];
    rows.value_cache[to] = rows.v[i];
  }
  for (int64_t i = first; rows.mask_bools && i < nodes * problem.mask_words; i += stride) {
    const int64_t node = i / problem.mask_words;
    rows.mask_bits[i] =
        pack_mask(rows.mask_bools + node * problem.nodes, problem.nodes, static_cast<int>(i % problem.mask_words));
  }
}

struct Compact {
  void *const *caches;          // [cache_count] of [B, Hkv, C, D]
  const int64_t *cache_len;     // [B]
  const int64_t *paths;         // [B, max_path]
  const int64_t *path_lengths;  // [B]
  int cache_count;
  int batch;
  int kv_heads;
  int capacity;
  int max_path;
  int chunks;  // of a row of one head
};

constexpr int kRowsAtOnce = 8;

// Each thread owns one chunk column of one head of one cache and moves its accepted rows in the order of the path.
// Paths increase, so paths[i] > i, and each row is read before another overwrites it. kRowsAtOnce reads run together.
// Moves 2 * cache_count * Hkv * D elements for each accepted row that is not in its place.
REDRAFT_GLOBAL(kCopyThreads) compact(Compact work) {
  const int64_t columns = static_cast<int64_t>(work.cache_count) * work.batch * work.kv_heads * work.chunks;
  const int64_t stride = static_cast<int64_t>(block_count()) * kCopyThreads;
  for (int64_t i = static_cast<int64_t>(block_index()) * kCopyThreads + thread_index(); i < columns; i += stride) {
    const int column = static_cast<int>(i % work.chunks);
    const int head = static_cast<int>(i / work.chunks % work.kv_heads);
    const int sequence = static_cast<int>(i / work.chunks / work.kv_heads % work.batch);
    Chunk *cache = static_cast<Chunk *>(work.caches[i / work.chunks / work.kv_heads / work.batch]);
    cache += (static_cast<int64_t>(sequence) * work.kv_heads + head) * work.capacity * work.chunks + column;
    const int64_t past = work.cache_len[sequence];
    const int64_t *path = work.paths + static_cast<int64_t>(sequence) * work.max_path;
    const int64_t length = work.path_lengths[sequence];
    const int accepted = length < 0 ? 0 : length > work.max_path ? work.max_path : static_cast<int>(length);
    if (past < 0) continue;
    for (int start = 0; start < accepted; start += kRowsAtOnce) {
      Chunk held[kRowsAtOnce];
      bool moves[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int64_t node = start + r < accepted ? path[start + r] : 0;
        moves[r] = node > start + r + 1 && node < work.capacity - past;
        if (moves[r]) held[r] = cache[(past + node) * work.chunks];
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (moves[r]) cache[(past + start + r + 1) * work.chunks] = held[r];
      }
    }
  }
}

}  // namespace redraft
