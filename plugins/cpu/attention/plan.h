// What a call computes, in parts that threads share: first all of `write`, then all of `attend`, then all of `merge`.

#pragma once

#include <stdint.h>

#include <vector>

#include "attention.h"
#include "gate.h"

namespace redraft::attention {

constexpr int64_t kBlock = 256;     // positions whose values are summed as one
constexpr int64_t kKeys = 16;       // keys of a packed group, and lanes of a sum
constexpr int64_t kTileRows = 48;   // query rows that share the packed keys of a head
constexpr int64_t kMostSplit = 16;  // with fewer tiles, threads share the blocks of a tile too
constexpr int64_t kMostPartialBytes = int64_t{8} << 20;

// A node with the keys that it sees: positions begin .. prefix - 1 at the cache rows of these numbers, and positions
// prefix .. end - 1 at the rows of `tail`, which are relative to the sequence's committed rows. A node that sees places
// after its own has its keys at positions in the order of their places.
struct Node {
  int64_t row, begin, prefix, end, tail;
};

// Nodes of one sequence that are computed together, and their blocks.
struct Tile {
  int64_t sequence, first, count, first_block, last_block;
  int64_t pair, partial;  // if split: its first pair of a tile and a block, and the rows of all pairs before
};

struct Plan {
  // Returns what is wrong with the call, or null. The call must outlive the plan's use.
  const char *make(const redraft_attention_call &call);

  int64_t groups() const { return call->q_heads / call->kv_heads; }
  int64_t attend_tasks() const { return (split ? partials : static_cast<int64_t>(tiles.size())) * call->kv_heads; }
  int64_t merge_tasks() const { return split ? static_cast<int64_t>(tiles.size()) * call->kv_heads : 0; }
  // Sums of a row and block: o [D], then m and l.
  int64_t partial_floats() const { return call->head_dim + 2; }
  // Where the sums of a tile's block and a head begin.
  float *partial(const Tile &tile, int64_t block, int64_t head) {
    const int64_t rows = tile.count * groups();
    const int64_t before = tile.partial * call->kv_heads + ((block - tile.first_block) * call->kv_heads + head) * rows;
    return sums.data() + before * partial_floats();
  }

  const redraft_attention_call *call = nullptr;
  std::vector<Node> nodes;
  std::vector<int64_t> tails;  // rows after the committed ones
  std::vector<Tile> tiles;
  std::vector<int64_t> tile_of;  // of each pair of a tile and a block, if split
  std::vector<float> q;          // rotated and scaled, [N, Hq * D]
  std::vector<float> sums;       // of all tiles, heads, blocks and rows, if split
  bool split = false;
  int64_t partials = 0;      // pairs of a tile and a block
  int64_t partial_rows = 0;  // rows of all these pairs
  double multiplications = 0;

 private:
  const char *add(int64_t row, int64_t sequence, int64_t place);
};

struct Kernels {
  const char *isa;
  bool (*is_here)();
  void (*write)(Plan &plan, int64_t first, int64_t last);                    // nodes
  void (*attend)(Plan &plan, int64_t first, int64_t last);                   // of attend_tasks
  void (*merge)(Plan &plan, int64_t first, int64_t last);                    // of merge_tasks
  void (*gate)(const redraft_gate_call &call, int64_t first, int64_t last);  // rows
};

extern const Kernels kAvx512, kAvx2, kNeon, kScalar;

const Kernels &kernels();

}  // namespace redraft::attention
