// What every kernel of one attention call is given, and how its work is divided among blocks.
//
// A unit is one sequence, one key/value head and up to `kRows` of the queries that read this head: all nodes, times the
// query heads of the group, node-major. Its keys come in tiles of `kTile` rows. The tiles of all units, counted through
// (sequence, head, queries), are shared out evenly: block i takes the tiles from i * share on. So sequences of any
// lengths keep all blocks equally busy, the launch does not depend on the lengths (one CUDA graph serves all), and each
// block leaves at most two units unfinished, at its seams, for merge.cuh. The idea is Stream-K (Osama et al. 2023,
// arXiv:2301.03598) on flash-decoding's split over the keys (Dao et al. 2023).

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

// The least work worth a block: fewer tiles each would cost more at the seams than they gain.
constexpr int kLeastShare = 2;

REDRAFT_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
REDRAFT_DEVICE int larger(int a, int b) { return a < b ? b : a; }

// Rows of one sequence: [0, past) are committed, [past, end) belong to its first end - past nodes.
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

// Tiles that the queries [first_row, last_row] of a sequence may see: [first, end). Never empty, so that every unit has
// a block that writes its output.
struct Tiles {
  int first;
  int end;
};

template <class Shape>
REDRAFT_DEVICE Tiles tiles_of(const Problem &problem, const Extent &extent, int row_block) {
  const int first_node = row_block * Shape::kRows / problem.group;
  const int last_row = smaller((row_block + 1) * Shape::kRows, problem.nodes * problem.group) - 1;
  const int end = problem.mask ? extent.end : smaller(extent.past + last_row / problem.group + 1, extent.end);
  // Every position of a query is at least past, and in a causal chunk past + its node.
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

// Tiles of all row blocks of one head of a sequence. Under a mask they all have as many.
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

// Tiles that each block takes, out of `total`.
REDRAFT_DEVICE int64_t share_of(int64_t total, int blocks) {
  const int64_t even = (total + blocks - 1) / blocks;
  return even < kLeastShare ? kLeastShare : even;
}

// One unit: its tiles, and how many tiles of other units come before them.
struct Unit {
  int sequence;
  int head;
  int row_block;
  Tiles tiles;
  int64_t start;

  REDRAFT_DEVICE int64_t end() const { return start + (tiles.end - tiles.first); }
};

// The unit that holds tile `tile`, counted through all units; there must be one.
template <class Shape>
REDRAFT_DEVICE Unit unit_at(const Problem &problem, int64_t tile) {
  Unit unit{};
  int64_t left = tile;  // the offset of the tile within ever smaller parts
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

// Where a block leaves its part of an unfinished unit: slot 0 if the unit holds the block's first tile, else slot 1.
template <class Shape>
REDRAFT_DEVICE float *partial_at(const Problem &problem, int64_t block, int slot) {
  return problem.partials + (2 * block + slot) * Shape::kRows * (Shape::kHeadDim + 2);
}

// Which node and query head a row of a unit is.
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

// Whether node `node` sees row `row` of its sequence's cache.
REDRAFT_DEVICE bool visible(const Problem &problem, const Extent &extent, int sequence, int node, int row) {
  const int seen = row - extent.past;  // the node that the row belongs to, negative where it is committed
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
