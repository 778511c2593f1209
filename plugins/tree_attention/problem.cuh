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
  const void *k;               // [B, T, Hkv * D], null: the cache has these rows
  const void *v;               // [B, T, Hkv * D]
  void *key_cache;             // [B, Hkv, C, D]
  void *value_cache;           // [B, Hkv, C, D]
  const uint32_t *mask_bits;   // [B, T, mask_words]
  const uint8_t *mask_bools;   // [B, T, T]; both masks null: causal
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

  REDRAFT_ANYWHERE bool masked() const { return mask_bits || mask_bools; }
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
  const int end = problem.masked() ? extent.end : smaller(extent.past + last_row / problem.group + 1, extent.end);
  // A query's position is at least past, and in a causal chunk past + its node.
  const int earliest = problem.masked() ? extent.past : extent.past + first_node;
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

// Tiles of the first `blocks` row blocks of one head of a sequence. Under a mask, all have the same number.
template <class Shape>
REDRAFT_DEVICE int64_t tiles_before(const Problem &problem, const Extent &extent, int blocks) {
  if (problem.masked()) {
    const Tiles tiles = tiles_of<Shape>(problem, extent, 0);
    return static_cast<int64_t>(tiles.end - tiles.first) * blocks;
  }
  int64_t sum = 0;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const Tiles tiles = tiles_of<Shape>(problem, extent, block);
    sum += tiles.end - tiles.first;
  }
  return sum;
}

template <class Shape>
REDRAFT_DEVICE int64_t head_tiles(const Problem &problem, const Extent &extent) {
  return tiles_before<Shape>(problem, extent, row_blocks_of<Shape>(problem));
}

template <class Shape>
REDRAFT_DEVICE int64_t all_tiles(const Problem &problem) {
  int64_t sum = 0;
#pragma unroll 1
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
#pragma unroll 1
  while (left >= per_head * problem.kv_heads) {
    left -= per_head * problem.kv_heads;
    extent = extent_of(problem, ++unit.sequence);
    per_head = head_tiles<Shape>(problem, extent);
  }
  unit.head = static_cast<int>(left / per_head);
  left %= per_head;
  unit.tiles = tiles_of<Shape>(problem, extent, 0);
  if (problem.masked()) {
    unit.row_block = static_cast<int>(left / (unit.tiles.end - unit.tiles.first));
    left %= unit.tiles.end - unit.tiles.first;
  }
#pragma unroll 1
  while (left >= unit.tiles.end - unit.tiles.first) {
    left -= unit.tiles.end - unit.tiles.first;
    unit.tiles = tiles_of<Shape>(problem, extent, ++unit.row_block);
  }
  unit.start = tile - left;
  return unit;
}

// Unit `number` in the order of the tiles' numbering.
template <class Shape>
REDRAFT_DEVICE Unit unit_of(const Problem &problem, int number) {
  const int row_blocks = row_blocks_of<Shape>(problem);
  Unit unit{};
  unit.row_block = number % row_blocks;
  unit.head = number / row_blocks % problem.kv_heads;
  unit.sequence = number / row_blocks / problem.kv_heads;
#pragma unroll 1
  for (int b = 0; b < unit.sequence; ++b) {
    unit.start += head_tiles<Shape>(problem, extent_of(problem, b)) * problem.kv_heads;
  }
  const Extent extent = extent_of(problem, unit.sequence);
  unit.start += head_tiles<Shape>(problem, extent) * unit.head + tiles_before<Shape>(problem, extent, unit.row_block);
  unit.tiles = tiles_of<Shape>(problem, extent, unit.row_block);
  return unit;
}

// Nodes whose new rows a unit writes to the cache: [first, end), those whose first query it has, as far as the rows
// count. So some unit of a head writes each of these rows, once. A unit's tiles hold the rows of its own nodes under
// any window.
struct Nodes {
  int first;
  int end;
};

template <class Shape>
REDRAFT_DEVICE Nodes own_nodes(const Problem &problem, const Extent &extent, int row_block) {
  const int up = problem.group - 1;
  Nodes nodes;
  nodes.first = (row_block * Shape::kRows + up) / problem.group;
  nodes.end = smaller(((row_block + 1) * Shape::kRows + up) / problem.group, extent.end - extent.past);
  return nodes;
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

// Returns true if the window lets node `node` see row `row` of its sequence, one before `extent.end`.
REDRAFT_DEVICE bool in_window(const Problem &problem, const Extent &extent, int sequence, int node, int row) {
  if (problem.window <= 0) return true;
  const int64_t first_node = static_cast<int64_t>(sequence) * problem.nodes;
  const int seen = row - extent.past;  // the row's node, negative for a committed row
  const int64_t from = problem.positions ? problem.positions[first_node + node] : extent.past + node;
  const int64_t to = seen >= 0 && problem.positions ? problem.positions[first_node + seen] : row;
  return from - to < problem.window;
}

}  // namespace redraft
