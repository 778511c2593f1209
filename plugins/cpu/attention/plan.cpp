#include "plan.h"

#include <algorithm>
#include <cstring>

namespace redraft::attention {

const char *Plan::make(const redraft_attention_call &given) {
  call = &given;
  const auto &c = given;
  if (c.sequences < 0 || c.nodes < 0 || c.rows < 0 || c.capacity < 0) return "expected no negative size";
  if (c.q_heads <= 0 || c.kv_heads <= 0 || c.q_heads % c.kv_heads) return "q_heads: expected a multiple of kv_heads";
  if (groups() > kTileRows) return "expected at most 48 query heads for a key head";
  if (c.head_dim <= 0 || c.head_dim % kKeys || c.head_dim > 256) {
    return "expected heads of a multiple of 16 numbers, up to 256";
  }
  if (c.window < 0 || c.chunk < 0) return "window and chunk: expected no negative number";
  if (!c.cosines != !c.sines) return "cosines and sines: expected both or none";
  int64_t places;
  if (__builtin_mul_overflow(c.sequences, c.nodes, &places) || (!c.packed_rows && c.rows != places)) {
    return "expected a row for each place";
  }
  nodes.clear();
  tails.clear();
  tiles.clear();
  tile_of.clear();
  multiplications = 0;
  partials = partial_rows = 0;
  const int64_t tokens = std::max<int64_t>(1, kTileRows / groups());
  int64_t before = -1;
  for (int64_t row = 0; row < c.rows; ++row) {
    const int64_t place = c.packed_rows ? c.packed_rows[row] : row;
    if (place <= before || place >= places) return "packed_rows: expected ascending places of the batch";
    before = place;
    const int64_t sequence = place / c.nodes;
    if (const char *wrong = add(row, sequence, place % c.nodes)) return wrong;
    const Node &node = nodes.back();
    const int64_t first = node.begin / kBlock, last = (node.end + kBlock - 1) / kBlock;
    if (tiles.empty() || tiles.back().sequence != sequence || tiles.back().count == tokens) {
      tiles.push_back({sequence, row, 0, first, last, 0, 0});
    }
    Tile &tile = tiles.back();
    ++tile.count;
    tile.first_block = std::min(tile.first_block, first);
    tile.last_block = std::max(tile.last_block, last);
    multiplications += 2.0 * static_cast<double>((node.end - node.begin) * c.q_heads * c.head_dim);
  }
  for (Tile &tile : tiles) {
    const int64_t blocks = tile.last_block - tile.first_block;
    tile.pair = partials;
    tile.partial = partial_rows;
    partials += blocks;
    partial_rows += blocks * tile.count * groups();
  }
  const int64_t floats = partial_rows * c.kv_heads * partial_floats();
  const auto count = static_cast<int64_t>(tiles.size());
  split = count * c.kv_heads < kMostSplit && partials > count &&
          floats <= kMostPartialBytes / static_cast<int64_t>(sizeof(float));
  if (split) {
    for (int64_t tile = 0; tile < count; ++tile) {
      tile_of.insert(tile_of.end(), static_cast<size_t>(tiles[tile].last_block - tiles[tile].first_block), tile);
    }
    sums.resize(std::max(sums.size(), static_cast<size_t>(floats)));
  }
  q.resize(std::max(q.size(), static_cast<size_t>(c.rows * c.q_heads * c.head_dim)));
  return nullptr;
}

const char *Plan::add(int64_t row, int64_t sequence, int64_t place) {
  const auto &c = *call;
  const int64_t past = c.cache_len[sequence];
  if (past < 0 || past >= c.capacity - place) return "cache_len: expected room for the nodes in the cache";
  if (c.cosines && (c.positions[row] < 0 || c.positions[row] >= c.table_rows)) {
    return "positions: expected rows of the rotation's tables";
  }
  const int64_t position = std::clamp(c.positions[row], past, past + place), depth = position - past;
  const uint8_t *mask = c.tree_mask + (sequence * c.nodes + place) * c.nodes;
  const bool ahead = std::memchr(mask + place + 1, 1, static_cast<size_t>(c.nodes - place - 1)) != nullptr;
  if (ahead && past > c.capacity - c.nodes) return "cache_len: expected room for the nodes in the cache";
  const int64_t keys = ahead ? c.nodes - std::count(mask, mask + c.nodes, uint8_t{0}) : depth + 1;
  const int64_t last = ahead ? c.nodes - 1 : place;
  Node node{row, 0, past + keys, past + keys, static_cast<int64_t>(tails.size())};
  if (c.window && position >= c.window) node.begin = position - c.window + 1;
  if (c.chunk) node.begin = std::max(node.begin, position / c.chunk * c.chunk);
  node.begin = std::min(node.begin, node.end - 1);  // a node that sees places after its own may see few
  if (ahead || depth < place) {                     // its path is not all places up to its own
    int64_t found = 0;
    for (int64_t other = 0; other <= last && found < keys; ++other) {
      if (!mask[other]) continue;
      const bool in_tail = node.prefix != node.end;
      if (!in_tail && other != found) node.prefix = past + found;
      if (in_tail || other != found) tails.push_back(other);
      ++found;
    }
    if (found < keys) return "tree_mask: expected a node's ancestors to be as many as its depth";
  }
  nodes.push_back(node);
  return nullptr;
}

}  // namespace redraft::attention
