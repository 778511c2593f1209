// Writing of results, and the kernel that joins the units that several blocks worked on.
//
// A row's parts i come as sums o_i of p v, the highest score m_i (log2) and the sum l_i of powers, so with
// M = max m_i:  out = sum o_i 2^(m_i - M) / sum l_i 2^(m_i - M).
// Bytes moved: kRows * (D + 2) floats written and read once a part, two parts a block at most.

#pragma once

#include "problem.cuh"
#include "shape.cuh"

namespace redraft {

template <class T>
REDRAFT_DEVICE void store_four(T *to, const float (&values)[4]) {
  uint32_t *words = reinterpret_cast<uint32_t *>(to);
  words[0] = pack<T>(values[0], values[1]);
  words[1] = pack<T>(values[2], values[3]);
}

template <>
REDRAFT_DEVICE void store_four<float>(float *to, const float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = values[i];
}

// Four columns of one row of a unit; nodes past a tree's count, and rows that see nothing, are zero.
template <class Shape>
REDRAFT_DEVICE void write_out(const Problem &problem, const Extent &extent, const Segment &unit, int row, int column,
                              const float (&sum)[4], float weight) {
  using T = typename Shape::Element;
  const int of_all = unit.row_block * Shape::kRows + row;
  if (of_all >= problem.nodes * problem.group) return;
  const Query query = query_of(problem, unit.head, of_all);
  const bool live = query.node < extent.nodes && weight > 0.f;
  float values[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) values[c] = live ? sum[c] / weight : 0.f;
  store_four(static_cast<T *>(problem.out) + query_offset(problem, unit.sequence, query, Shape::kHeadDim) + column,
             values);
}

constexpr int kMergeRows = 8;

// Grid: every unit by every kMergeRows rows of it. `blocks` is the grid of the attention kernel.
template <class Shape>
REDRAFT_GLOBAL(kThreads) merge(Problem problem, int blocks) {
  Segment unit{};
  unit.row_block = block_index() % row_blocks_of<Shape>(problem);
  unit.head = block_index() / row_blocks_of<Shape>(problem) % problem.kv_heads;
  unit.sequence = block_index() / row_blocks_of<Shape>(problem) / problem.kv_heads;
  const Extent extent = extent_of(problem, unit.sequence);
  int64_t start = tiles_before<Shape>(problem, unit.sequence) + head_tiles<Shape>(problem, extent) * unit.head;
  for (int block = 0; block < unit.row_block; ++block) {
    const Tiles tiles = tiles_of<Shape>(problem, extent, block);
    start += tiles.end - tiles.first;
  }
  unit.tiles = tiles_of<Shape>(problem, extent, unit.row_block);
  const int64_t share = share_of(tiles_before<Shape>(problem, problem.batch), blocks);
  const int64_t first = start / share;
  const int64_t last = (start + unit.tiles.end - unit.tiles.first - 1) / share;
  if (first == last) return;
  constexpr int kQuads = Shape::kHeadDim / 4;
  for (int i = thread_index(); i < kMergeRows * kQuads; i += kThreads) {
    const int row = block_index_y() * kMergeRows + i / kQuads;
    const int column = i % kQuads * 4;
    float peak = -INFINITY;
    float weight = 0.f;
    float sum[4] = {};
    for (int64_t block = first; block <= last; ++block) {
      const float *part = partial_at<Shape>(problem, block, start <= block * share ? 0 : 1);
      const float its_peak = part[Shape::kRows * Shape::kHeadDim + 2 * row];
      const float joint = fmaxf(peak, its_peak);
      const float base = joint == -INFINITY ? 0.f : joint;
      const float mine = power_of_two(peak - base);
      const float its = power_of_two(its_peak - base);
      weight = weight * mine + part[Shape::kRows * Shape::kHeadDim + 2 * row + 1] * its;
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = sum[c] * mine + part[row * Shape::kHeadDim + column + c] * its;
      peak = joint;
    }
    write_out<Shape>(problem, extent, unit, row, column, sum, weight);
  }
}

}  // namespace redraft
