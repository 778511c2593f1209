// Sizes of the attention kernel's tiles for an element type, a head size and an arrangement of a block's four warps.
//
// kRowWarps rows of warps process 16 query rows each. The warps of a row divide each tile's keys, each with its own
// running softmax, and merge at the end. Few queries (one node, a small tree) use one row of warps and four key slices; 64
// rows and more use four rows of warps.

#pragma once

#include "platform.cuh"

namespace redraft {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStages = 2;
constexpr int kMostSharedBytes = 99 * 1024;  // of one block on compute capability 8.6, 8.9 and 12.0, the least of all

template <class T, int kHeadDim_, int kRowWarps_>
struct AttentionShape {
  using Element = T;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kKeyWarps = kWarps / kRowWarps;
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kChunksPerRow = kRowBytes / 16;
  static constexpr int kTile = kRowBytes <= 256 ? 64 : kRowBytes <= 512 ? 32 : 16;
  static constexpr int kSlice = kTile / kKeyWarps;  // keys of a tile for one warp
  static constexpr int kProductDepth = sizeof(T) == 2 ? 16 : 8;
  // Sixteen bytes more than a row, so that eight consecutive rows are in different banks. Those behind query
  // row i hold what the unit's node i sees of a tile, a bit a key.
  static constexpr int kStride = kHeadDim + 16 / static_cast<int>(sizeof(T));
  static constexpr int kTileBytes = kTile * kStride * static_cast<int>(sizeof(T));
  static constexpr int kQueryBytes = kRows * kStride * static_cast<int>(sizeof(T));
  static constexpr int kLoadBytes = kQueryBytes + 2 * kStages * kTileBytes;
  // At the end each warp stores its 16 rows as floats, with padding for the same reason, and each row's two sums.
  static constexpr int kSumStride = kHeadDim + 4;
  static constexpr int kMergeBytes = kWarps * 16 * (kSumStride + 2) * 4;
  static constexpr int kSharedBytes = kLoadBytes > kMergeBytes ? kLoadBytes : kMergeBytes;
  static constexpr bool kFits = kSharedBytes <= kMostSharedBytes && kSlice >= kProductDepth;

  static_assert(kTile <= 4 * kWarp, "the sixteen bytes behind a query row hold a bit for each key of a tile");
  static_assert(kTile * kChunksPerRow % kThreads == 0, "every thread copies as many chunks of a tile");
  static_assert(kRowBytes % 16 == 0 && kHeadDim % 16 == 0, "rows are read in chunks of 16 bytes and 16 elements");
};

}  // namespace redraft
