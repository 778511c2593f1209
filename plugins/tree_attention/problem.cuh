// Arguments of every kernel of one attention call, and the division of its work among blocks.
//
// A unit is one sequence, one key/value head and up to `kRows` of the queries that read this head: all nodes, times the
// query heads of the group, node-major. Its keys come in tiles of `kTile` rows. The tiles of all units have one
// numbering (sequence, head, queries), and blocks get equal shares: block i processes the tiles from i * share on.
// Sequences of any lengths thus keep all blocks equally busy. The launch does not depend on the lengths, so one CUDA
// graph serves all. Each block leaves at most two units unfinished, its first and its last, for merge.cuh. The idea
// is Stream-K (Osama et al. 2023, arXiv:2301.03598) on flash-decoding's split over the keys (Dao et al. 2023).

#pragma once

#include "platform.cuh"

namespace redraft {

struct Problem {
  const void *q;               // [B, T, Hq * D]
  void *out;                   // [B, T, Hq * D]
  const void *key_cache;       // [B, Hkv, C, D]
  const void *value_cache;     // [B, Hkv, C, D]
  const uint32_t *mask;        // [B, T, mask_words], null: causal
  const int64_t *positions;    // [B, T], null: cache_len + i
  const int64_t *cache_len;    // [B]
  const int64_t *node_counts;  // [B], null: T
  float *partials;             // [2 * blocks][rows * (D + 2)]
  int batch;
  int nodes;
  int q_heads;
  int kv_heads;
  int group;  // query heads that share a key head
  int capacity;
  int mask_words;
  int window;
  float scale;
  float softcap;
};

// The least work for a block: with fewer tiles, merging costs more than the block gains.
constexpr int kLeastShare = 2;

REDRAFT_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
REDRAFT_DEVICE int larger(int a, int b) { return a < b ? b : a; }

// Rows of one sequence: [0, past) are committed; [past, end) are those of its first end - past nodes.
struct Extent {
  int past;
  int end;
  int nodes;
};

REDRAFT_DEVICE Extent extent_of(const Problem &problem, int sequence) {
  const int64_t given = problem.cache_len[sequence];
  const int64_t count = problem.node_counts ? problem.node_counts[sequence] : problem.nodes;
  Extent extent;
  extent.past = given < 0 ? 0 : given > problem.capacity ? problem.capacity : static_cast<int>(given);
  extent.nodes = count < 0 ? 0 : count > problem.nodes ? problem.nodes : static_cast<int>(count);
  extent.end = smaller(extent.past + extent.nodes, problem.capacity);
  return extent;
}

// Tiles that the queries [first_row, last_row] of a sequence may see: [first, end). It is never empty, so that some
// block writes the output of every unit.
struct Tiles {
  int first;
  int end;
};

template <class Shape>
REDRAFT_DEVICE Tiles tiles_of(const Problem &problem, const Extent &extent, int row_block) {
  const int first_node = row_block * Shape::kRows / problem.group;
  const int last_row = smaller((row_block + 1) * Shape::kRows, problem.nodes * problem.group) - 1;
  const int end = problem.mask ? extent.end : smaller(extent.past + last_row / problem.group + 1, extent.end);
  // A query's position is at least past, and in a causal chunk past + its node.
  const int earliest = problem.mask ? extent.past : extent.past + first_node;
  const int begin = problem.window > 0 ? larger(earliest - problem.window + 1, 0) : 0;
  Tiles tiles;
  tiles.end = larger((end + Shape::kTile - 1) / Shape::kTile, 1);
  tiles.first = smaller(begin / Shape::kTile, tiles.end - 1);
  return tiles;
}

template <class Shape>
REDRAFT_DEVICE int row_blocks_of(const Problem &problem) {
  return (problem.nodes * problem.group + Shape::kRows - 1) / Shape::kRows;
}

// Tiles of all row blocks of one head of a sequence. Under a mask, all have the same number.
template <class Shape>
REDRAFT_DEVICE int64_t head_tiles(const Problem &problem, const Extent &extent) {
  const int blocks = row_blocks_of<Shape>(problem);
  if (problem.mask) {
    const Tiles tiles = tiles_of<Shape>(problem, extent, 0);
    return static_cast<int64_t>(tiles.end - tiles.first) * blocks;
  }
  int64_t sum = 0;
  for (int block = 0; block < blocks; ++block) {
    const Tiles tiles = tiles_of<Shape>(problem, extent, block);
    sum += tiles.end - tiles.first;
  }
  return sum;
}

template <class Shape>
REDRAFT_DEVICE int64_t all_tiles(const Problem &problem) {
  int64_t sum = 0;
  for (int b = 0; b < problem.batch; ++b) sum += head_tiles<Shape>(problem, extent_of(problem, b)) * problem.kv_heads;
  return sum;
}

// Tiles of each block, out of `total`.
REDRAFT_DEVICE int64_t share_of(int64_t total, int blocks) {
  const int64_t even = (total + blocks - 1) / blocks;
  return even < kLeastShare ? kLeastShare : even;
}

// One unit: its tiles, and the number of tiles of earlier units.
struct Unit {
  int sequence;
  int head;
  int row_block;
  Tiles tiles;
  int64_t start;

  REDRAFT_DEVICE int64_t end() const { return start + (tiles.end - tiles.first); }
};

// The unit that holds tile `tile` in the numbering over all units. It must exist.
template <class Shape>
REDRAFT_DEVICE Unit unit_at(const Problem &problem, int64_t tile) {
  Unit unit{};
  int64_t left = tile;  // the tile's offset, in smaller parts at each step
  Extent extent = extent_of(problem, 0);
  int64_t per_head = head_tiles<Shape>(problem, extent);
  while (left >= per_head * problem.kv_heads) {
    left -= per_head * problem.kv_heads;
    extent = extent_of(problem, ++unit.sequence);
    per_head = head_tiles<Shape>(problem, extent);
  }
  unit.head = static_cast<int>(left / per_head);
  left %= per_head;
  unit.tiles = tiles_of<Shape>(problem, extent, 0);
  if (problem.mask) {
    unit.row_block = static_cast<int>(left / (unit.tiles.end - unit.tiles.first));
    left %= unit.tiles.end - unit.tiles.first;
  }
  while (left >= unit.tiles.end - unit.tiles.first) {
    left -= unit.tiles.end - unit.tiles.first;
    unit.tiles = tiles_of<Shape>(problem, extent, ++unit.row_block);
  }
  unit.start = tile - left;
  return unit;
}

// Query rows of a unit that exist.
template <class Shape>
REDRAFT_DEVICE int rows_of(const Problem &problem, const Unit &unit) {
  return smaller(Shape::kRows, problem.nodes * problem.group - unit.row_block * Shape::kRows);
}

// The place of a block's partial result of an unfinished unit: slot 0 if the unit holds its first tile, else slot 1.
template <class Shape>
REDRAFT_DEVICE float *partial_at(const Problem &problem, int64_t block, int slot) {
  return problem.partials + (2 * block + slot) * Shape::kRows * (Shape::kHeadDim + 2);
}

// Node and query head of a unit's row.
struct Query {
  int node;
  int head;
};

REDRAFT_DEVICE Query query_of(const Problem &problem, int kv_head, int row) {
  Query query;
  query.node = row / problem.group;
  query.head = kv_head * problem.group + row % problem.group;
  return query;
}

// Element offset of a query's row in q and out.
REDRAFT_DEVICE int64_t query_offset(const Problem &problem, int sequence, const Query &query, int head_dim) {
  return ((static_cast<int64_t>(sequence) * problem.nodes + query.node) * problem.q_heads + query.head) * head_dim;
}

// Returns true if node `node` sees row `row` of its sequence's cache.
REDRAFT_DEVICE bool visible(const Problem &problem, const Extent &extent, int sequence, int node, int row) {
  const int seen = row - extent.past;  // the row's node, negative for a committed row
  const int64_t first_node = static_cast<int64_t>(sequence) * problem.nodes;
  bool sees = row < extent.end;
  if (sees && seen >= 0) {
    sees = problem.mask ? (problem.mask[(first_node + node) * problem.mask_words + seen / 32] >> (seen % 32)) & 1u
                        : seen <= node;
  }
  if (sees && problem.window > 0) {
    const int64_t from = problem.positions ? problem.positions[first_node + node] : extent.past + node;
    const int64_t to = seen < 0 ? row : problem.positions ? problem.positions[first_node + seen] : row;
    sees = from - to < problem.window;
  }
  return sees;
}

}  // namespace redraft
