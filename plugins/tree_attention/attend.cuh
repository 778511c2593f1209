// The attention kernel. One block processes its share of key tiles (problem.cuh), one unit after the other.
//
//   for each tile of kTile rows, while cp.async copies the next one to shared memory (two stages):
//     cache rows = new rows    those of the unit's own nodes, from shared memory
//     s = q k^T scale          tensor cores, float32 sums
//     s = -inf where hidden    only in tiles that reach the tree, a window's edge or the last row
//     online softmax           Milakov and Gimelshein 2018, arXiv:1805.02867, in powers of two
//     o = o alpha + p v        tensor cores, with p rounded to the element type
//
// All queries of a unit share each tile, so the cache is read once for all nodes of a tree and all heads of a group:
// it moves all rows of K and V before `end` once per 64 query rows. Copies zero the rows from `end` on, so that their
// content, NaN included, has no effect.
//
// New rows come from k and v, not from the cache, which some block is writing (own_nodes): no block waits for another.

#pragma once

#include "merge.cuh"
#include "products.cuh"

namespace redraft {

constexpr float kLog2E = 1.4426950408889634f;
REDRAFT_DEVICE float minus_infinity() { return -INFINITY; }

template <class Shape>
struct Attend {
  using T = typename Shape::Element;
  using Product = Products<Shape>;

  const Problem &problem;
  Unit unit;
  Tiles tiles;  // of the unit, for this block
  Extent extent;
  T *queries;  // [kRows, kStride]
  T *stages;   // [kStages][2: keys, values][kTile, kStride]
  float out[Product::kOutBlocks][4];
  float highest[2];  // the largest score so far, log2, of rows g and g + 8
  float total[2];    // this lane's part of the sum of powers

  REDRAFT_DEVICE Attend(const Problem &given, const Unit &its, const Tiles &part, void *memory)
      : problem(given), unit(its), tiles(part), extent(extent_of(given, its.sequence)),
        queries(static_cast<T *>(memory)), stages(queries + Shape::kRows * Shape::kStride) {
#pragma unroll
    for (int n = 0; n < Product::kOutBlocks; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
    highest[0] = highest[1] = minus_infinity();
    total[0] = total[1] = 0.f;
  }

  REDRAFT_DEVICE int first_row() const { return unit.row_block * Shape::kRows; }
  REDRAFT_DEVICE int row_warp() const { return thread_index() / kWarp % Shape::kRowWarps; }
  REDRAFT_DEVICE int key_warp() const { return thread_index() / kWarp / Shape::kRowWarps; }
  REDRAFT_DEVICE T *keys_of(int stage) const { return stages + 2 * stage * Shape::kTile * Shape::kStride; }
  REDRAFT_DEVICE T *values_of(int stage) const { return keys_of(stage) + Shape::kTile * Shape::kStride; }

  REDRAFT_DEVICE void load_queries() {
    const T *from = static_cast<const T *>(problem.q);
    for (int i = thread_index(); i < Shape::kRows * Shape::kChunksPerRow; i += kThreads) {
      const int row = i / Shape::kChunksPerRow;
      const int column = i % Shape::kChunksPerRow * (16 / static_cast<int>(sizeof(T)));
      const bool valid = first_row() + row < problem.nodes * problem.group;
      const Query query = query_of(problem, unit.head, valid ? first_row() + row : 0);
      copy_async(queries + row * Shape::kStride + column,
                 from + query_offset(problem, unit.sequence, query, Shape::kHeadDim) + column, valid);
    }
  }

  REDRAFT_DEVICE void load_tile(int tile, int stage) {
    if (problem.k && (tile + 1) * Shape::kTile > extent.past) {
      load_rows<true>(tile, stage);
    } else {
      load_rows<false>(tile, stage);
    }
  }

  // Starts the copies of one tile: rows of the caches, and those from `past` on of k and v if kNew.
  template <bool kNew>
  REDRAFT_DEVICE void load_rows(int tile, int stage) {
    const T *key_rows = static_cast<const T *>(problem.key_cache) + cache_row(0) * Shape::kHeadDim;
    const T *value_rows = static_cast<const T *>(problem.value_cache) + cache_row(0) * Shape::kHeadDim;
    T *keys = keys_of(stage);
    T *values = values_of(stage);
#pragma unroll
    for (int step = 0; step < Shape::kTile * Shape::kChunksPerRow / kThreads; ++step) {
      const int i = thread_index() + step * kThreads;
      const int row = i / Shape::kChunksPerRow;
      const int column = i % Shape::kChunksPerRow * (16 / static_cast<int>(sizeof(T)));
      const int from = tile * Shape::kTile + row;
      const bool valid = from < extent.end;
      const int64_t offset = static_cast<int64_t>(valid ? from : 0) * Shape::kHeadDim + column;
      const T *key = key_rows + offset;
      const T *value = value_rows + offset;
      if (kNew && valid && from >= extent.past) {
        const int64_t node = static_cast<int64_t>(unit.sequence) * problem.nodes + from - extent.past;
        const int64_t given = (node * problem.kv_heads + unit.head) * Shape::kHeadDim + column;
        key = static_cast<const T *>(problem.k) + given;
        value = static_cast<const T *>(problem.v) + given;
      }
      copy_async(keys + row * Shape::kStride + column, key, valid);
      copy_async(values + row * Shape::kStride + column, value, valid);
    }
  }

  // The place of a row of this sequence and head in the caches.
  REDRAFT_DEVICE int64_t cache_row(int row) const {
    return (static_cast<int64_t>(unit.sequence) * problem.kv_heads + unit.head) * problem.capacity + row;
  }

  // Writes the new rows of the unit's own nodes in this tile to the caches. The tile has arrived.
  REDRAFT_DEVICE void store_new_rows(int tile, int stage) {
    if (!problem.k || (tile + 1) * Shape::kTile <= extent.past) return;
    const Nodes own = own_nodes<Shape>(problem, extent, unit.row_block);
    const int origin = tile * Shape::kTile;
    const int first = larger(extent.past + own.first - origin, 0);
    const int end = smaller(extent.past + own.end - origin, Shape::kTile);
    Chunk *key_rows = static_cast<Chunk *>(problem.key_cache) + cache_row(origin) * Shape::kChunksPerRow;
    Chunk *value_rows = static_cast<Chunk *>(problem.value_cache) + cache_row(origin) * Shape::kChunksPerRow;
    for (int i = first * Shape::kChunksPerRow + thread_index(); i < end * Shape::kChunksPerRow; i += kThreads) {
      const int from =
          i / Shape::kChunksPerRow * Shape::kStride + i % Shape::kChunksPerRow * (16 / static_cast<int>(sizeof(T)));
      key_rows[i] = *reinterpret_cast<const Chunk *>(keys_of(stage) + from);
      value_rows[i] = *reinterpret_cast<const Chunk *>(values_of(stage) + from);
    }
  }

  // Returns true if some query must not see some row of the tile.
  REDRAFT_DEVICE bool has_hidden(int tile) const {
    const int first = tile * Shape::kTile;
    // Every query sees the committed rows, and in a causal chunk the nodes up to the unit's first.
    const int seen =
        problem.masked() ? extent.past : smaller(extent.past + first_row() / problem.group + 1, extent.end);
    // Every position is below past + nodes.
    const bool near = problem.window <= 0 || extent.past + problem.nodes - 1 - first < problem.window;
    return !(first + Shape::kTile <= seen && near);
  }

  // What the unit's node `node`, counted from its first, sees of a tile: bit j of word w is row 32 w + j.
  REDRAFT_DEVICE uint32_t *seen_of(int node) {
    return reinterpret_cast<uint32_t *>(queries + node * Shape::kStride + Shape::kHeadDim);
  }

  // Notes what each node sees of a tile with hidden rows. A warp makes one word of 32 rows at a time, a row a lane, so
  // that bytes of a mask are read in sequence. It reads kAtOnce words' bytes before it uses the first.
  REDRAFT_DEVICE void note_seen(int tile) {
    constexpr int kAtOnce = 8;
    constexpr int kWords = (Shape::kTile + kWarp - 1) / kWarp;
    const int first_node = first_row() / problem.group;
    const int last_node = (first_row() + rows_of<Shape>(problem, unit) - 1) / problem.group;
    const int words = (last_node - first_node + 1) * kWords;
    for (int start = thread_index() / kWarp; start < words; start += kAtOnce * kWarps) {
      uint32_t allowed[kAtOnce];
      read_mask<kAtOnce, kWords>(allowed, tile, start, first_node, last_node);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int word = start + r * kWarps;
        if (word >= words) break;
        const int node = first_node + word / kWords;
        const int row = tile * Shape::kTile + word % kWords * kWarp + lane_of();
        const bool sees = row < extent.end && (row < extent.past || allowed[r] & 1u) &&
                          in_window(problem, extent, unit.sequence, node, row);
        const uint32_t bits = ballot(sees);
        if (lane_of() == 0) seen_of(word / kWords)[word % kWords] = bits;
      }
    }
  }

  // Reads whether the mask allows this lane's row for words start, start + kWarps, ...: bit 0. Reads have no condition
  // on the lane, so that all are under way at once; those of committed rows and of nodes past the last mean nothing.
  template <int kAtOnce, int kWords>
  REDRAFT_DEVICE void read_mask(uint32_t (&allowed)[kAtOnce], int tile, int start, int first_node,
                                int last_node) const {
    const int64_t sequence_node = static_cast<int64_t>(unit.sequence) * problem.nodes;
    const auto each = [&](auto allows) {
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int word = start + r * kWarps;
        const int row = tile * Shape::kTile + word % kWords * kWarp + lane_of();
        const int other = smaller(larger(row - extent.past, 0), problem.nodes - 1);
        allowed[r] = allows(smaller(first_node + word / kWords, last_node), other);
      }
    };
    if (problem.mask_bools) {
      each([&](int node, int other) -> uint32_t {
        return problem.mask_bools[(sequence_node + node) * problem.nodes + other];
      });
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) allowed[r] = allowed[r] != 0;
    } else if (problem.mask_bits) {
      each([&](int node, int other) -> uint32_t {
        return problem.mask_bits[(sequence_node + node) * problem.mask_words + other / 32] >> other % 32;
      });
    } else {
      each([&](int node, int other) -> uint32_t { return other <= node; });
    }
  }

  // Turns scores into exponents of two.
  REDRAFT_DEVICE void scale(float (&scores)[Product::kBlocks][4]) const {
    const bool capped = problem.softcap > 0.f;
    const float factor = capped ? problem.scale / problem.softcap : problem.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < Product::kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= factor;
    }
    if (capped) cap(scores);
  }

  REDRAFT_DEVICE void cap(float (&scores)[Product::kBlocks][4]) const {
#pragma unroll
    for (int n = 0; n < Product::kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = problem.softcap * kLog2E * tanhf(scores[n][i]);
    }
  }

  // Turns hidden scores into minus infinity, by the words of note_seen().
  REDRAFT_DEVICE void hide(float (&scores)[Product::kBlocks][4]) {
    const int row = first_row() + row_warp() * 16 + lane_of() / 4;
    const int first = key_warp() * Shape::kSlice;
    constexpr int kWordBlocks = Shape::kSlice < kWarp ? Product::kBlocks : kWarp / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int node = (row + half * 8) / problem.group - first_row() / problem.group;
      const uint32_t *words = seen_of(node) + first / kWarp;
#pragma unroll
      for (int n = 0; n < Product::kBlocks; ++n) {
        const uint32_t bits = words[n / kWordBlocks] >> (first % kWarp + lane_of() % 4 * 2) >> n % kWordBlocks * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!(bits >> i & 1u)) scores[n][2 * half + i] = minus_infinity();
        }
      }
    }
  }

  // Turns scores into weights relative to the highest score so far, and rescales the earlier sums.
  REDRAFT_DEVICE void soften(float (&scores)[Product::kBlocks][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = highest[half];
#pragma unroll
      for (int n = 0; n < Product::kBlocks; ++n) {
        peak = fmaxf(peak, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      peak = fmaxf(peak, shuffle_xor(peak, 1));
      peak = fmaxf(peak, shuffle_xor(peak, 2));
      const float base = peak == minus_infinity() ? 0.f : peak;
      const float alpha = power_of_two(highest[half] - base);
      highest[half] = peak;
      total[half] *= alpha;
#pragma unroll
      for (int n = 0; n < Product::kOutBlocks; ++n) {
        out[n][2 * half] *= alpha;
        out[n][2 * half + 1] *= alpha;
      }
#pragma unroll
      for (int n = 0; n < Product::kBlocks; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = power_of_two(scores[n][i] - base);
          total[half] += scores[n][i];
        }
      }
    }
  }

  REDRAFT_DEVICE void run_tiles() {
    load_queries();
    for (int next = tiles.first; next <= tiles.end; ++next) {
      if (next < tiles.end) load_tile(next, (next - tiles.first) % kStages);
      commit_copies();
      const int tile = next - 1;
      if (tile < tiles.first) continue;
      const int stage = (tile - tiles.first) % kStages;
      const bool hidden = has_hidden(tile);
      if (hidden) note_seen(tile);
      wait_copies<1>();
      sync_block();
      store_new_rows(tile, stage);
      float scores[Product::kBlocks][4] = {};
      const int slice = key_warp() * Shape::kSlice * Shape::kStride;
      Product::scores(scores, queries + row_warp() * 16 * Shape::kStride, keys_of(stage) + slice);
      scale(scores);
      if (hidden) hide(scores);
      soften(scores);
      Product::values(out, scores, values_of(stage) + slice);
      sync_block();
    }
  }

  // Stores this warp's rows as floats: [kKeyWarps][kRows][kSumStride], then highest and total of each row.
  REDRAFT_DEVICE void lay_down(float *sums, float *rows) {
    const int g = lane_of() / 4;
    const int t = lane_of() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] += shuffle_xor(total[half], 1);
      total[half] += shuffle_xor(total[half], 2);
      const int row = key_warp() * Shape::kRows + row_warp() * 16 + g + half * 8;
#pragma unroll
      for (int n = 0; n < Product::kOutBlocks; ++n) {
        sums[row * Shape::kSumStride + n * 8 + 2 * t] = out[n][2 * half];
        sums[row * Shape::kSumStride + n * 8 + 2 * t + 1] = out[n][2 * half + 1];
      }
      if (t == 0) {
        rows[2 * row] = highest[half];
        rows[2 * row + 1] = total[half];
      }
    }
  }

  // Merges the key slices of each row. Then writes the output, or the partial result of a unit shared with other
  // blocks.
  REDRAFT_DEVICE void finish(float *memory, float *partial) {
    float *sums = memory;
    float *rows = memory + kWarps * 16 * Shape::kSumStride;
    lay_down(sums, rows);
    sync_block();
    constexpr int kQuads = Shape::kHeadDim / 4;
    const bool whole = tiles.first == unit.tiles.first && tiles.end == unit.tiles.end;
    for (int i = thread_index(); i < rows_of<Shape>(problem, unit) * kQuads; i += kThreads) {
      const int row = i / kQuads;
      const int column = i % kQuads * 4;
      float peak = minus_infinity();
#pragma unroll
      for (int slice = 0; slice < Shape::kKeyWarps; ++slice) peak = fmaxf(peak, rows[2 * (row + slice * Shape::kRows)]);
      const float base = peak == minus_infinity() ? 0.f : peak;
      float sum[4] = {};
      float weight = 0.f;
#pragma unroll
      for (int slice = 0; slice < Shape::kKeyWarps; ++slice) {
        const int from = row + slice * Shape::kRows;
        const float alpha = power_of_two(rows[2 * from] - base);
        weight += rows[2 * from + 1] * alpha;
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += sums[from * Shape::kSumStride + column + c] * alpha;
      }
      if (whole) {
        write_out<Shape>(problem, extent, unit, row, column, sum, weight);
      } else {
        store_sums(partial + row * Shape::kHeadDim + column, sum);
        if (column == 0) {
          partial[Shape::kRows * Shape::kHeadDim + 2 * row] = peak;
          partial[Shape::kRows * Shape::kHeadDim + 2 * row + 1] = weight;
        }
      }
    }
  }
};

// q [B, T, Hq D], k, v [B, T, Hkv D], caches [B, Hkv, C, D] -> rows cache_len .. cache_len + T - 1 of the caches, and
// out [B, T, Hq D] except for units shared between blocks: see merge.cuh.
template <class Shape>
REDRAFT_GLOBAL(kThreads) attend(Problem problem) {
  const int64_t total = all_tiles<Shape>(problem);
  const int64_t share = share_of(total, block_count());
  const int64_t first = share * block_index();
  const int64_t end = first + share < total ? first + share : total;
  for (int64_t begin = first; begin < end;) {
    const Unit unit = unit_at<Shape>(problem, begin);
    const int64_t stop = unit.end() < end ? unit.end() : end;
    Tiles part;
    part.first = unit.tiles.first + static_cast<int>(begin - unit.start);
    part.end = unit.tiles.first + static_cast<int>(stop - unit.start);
    Attend<Shape> work(problem, unit, part, shared_memory());
    work.run_tiles();
    work.finish(reinterpret_cast<float *>(shared_memory()),
                partial_at<Shape>(problem, block_index(), begin == first ? 0 : 1));
    sync_block();
    begin = stop;
  }
}

}  // namespace redraft
