// The kernel that makes accepted rows contiguous. It copies bytes, 16 at a time.

#pragma once

#include "platform.cuh"

namespace redraft {

constexpr int kCopyThreads = 256;

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
