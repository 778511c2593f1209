// Writes results, and merges the partial results of units that several blocks share.
//
// A row's partial result i has the sums o_i of p v, the highest score m_i (log2) and the sum l_i of powers. With
// M = max m_i:  out = sum o_i 2^(m_i - M) / sum l_i 2^(m_i - M).
// Bytes moved: kRows * (D + 2) floats written and read once a partial result, at most two of them a block.

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

// Writes four columns of one row of a unit, which must exist. Nodes past a tree's count and rows that see nothing get
// zeros.
template <class Shape>
REDRAFT_DEVICE void write_out(const Problem &problem, const Extent &extent, const Unit &unit, int row, int column,
                              const float (&sum)[4], float weight) {
  using T = typename Shape::Element;
  const Query query = query_of(problem, unit.head, unit.row_block * Shape::kRows + row);
  const bool live = query.node < extent.nodes && weight > 0.f;
  float values[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) values[c] = live ? sum[c] / weight : 0.f;
  store_four(static_cast<T *>(problem.out) + query_offset(problem, unit.sequence, query, Shape::kHeadDim) + column,
             values);
}

struct alignas(16) Sums {
  float values[4];
};

REDRAFT_DEVICE void store_sums(float *to, const float (&sum)[4]) {
  Sums sums;
#pragma unroll
  for (int c = 0; c < 4; ++c) sums.values[c] = sum[c];
  *reinterpret_cast<Sums *>(to) = sums;
}

// The partial results of one row: the place of the first one. The next blocks store the others in slot 0.
template <class Shape>
struct Parts {
  const Problem &problem;
  int64_t first;
  int first_slot;
  int count;

  REDRAFT_DEVICE const float *at(int part) const {
    return partial_at<Shape>(problem, first + part, part == 0 ? first_slot : 0);
  }
  REDRAFT_DEVICE float peak(int part, int row) const { return at(part)[Shape::kRows * Shape::kHeadDim + 2 * row]; }
  REDRAFT_DEVICE float weight(int part, int row) const {
    return at(part)[Shape::kRows * Shape::kHeadDim + 2 * row + 1];
  }
};

// How blocks of the merge find their unit: block x has unit x, or the unit that begins in the share of block x of the
// attention kernel and continues after it, if any. The smaller grid is better: a unit may be of one block, and most
// shares end in a unit that began before or ends with them.
enum class MergeBy { kUnit, kSeam };

constexpr int kNone = -1;

// Returns the block of the attention kernel that holds the unit's first tile, or kNone if there is nothing to merge.
template <class Shape>
REDRAFT_DEVICE int find_shared(const Problem &problem, int64_t total, int64_t share, MergeBy by, Unit &unit) {
  if (by == MergeBy::kUnit) {
    unit = unit_of<Shape>(problem, block_index());
  } else {
    const int64_t seam = share * (block_index() + 1);
    if (seam >= total) return kNone;
    unit = unit_at<Shape>(problem, seam - 1);
  }
  const int64_t first = unit.start / share;
  if ((unit.end() - 1) / share == first || (by == MergeBy::kSeam && first != block_index())) return kNone;
  return static_cast<int>(first);
}

// Grid: units or seams, times groups of kWarps / kRowMergers rows. kRowMergers warps process one row. Each first finds the
// row's largest score and its weight, one partial result a lane. Then it sums every kRowMergers-th partial result, four
// columns a lane, with independent loads. Few units have many partial results each: there, all warps of a block sum
// one row.
template <class Shape, int kRowMergers>
REDRAFT_GLOBAL(kThreads) merge(Problem problem, int blocks, MergeBy by) {
  const int64_t total = all_tiles<Shape>(problem);
  const int64_t share = share_of(total, blocks);
  Unit unit;
  const int first = find_shared<Shape>(problem, total, share, by, unit);
  if (first == kNone) return;
  const int warp = thread_index() / kWarp;
  const int row = block_index_y() * (kWarps / kRowMergers) + warp / kRowMergers;
  if (row >= rows_of<Shape>(problem, unit)) return;  // all warps of a row
  const int lane = thread_index() % kWarp;
  const Parts<Shape> parts{problem, first, unit.start == first * share ? 0 : 1,
                           static_cast<int>((unit.end() - 1) / share) - first + 1};
  float peak = -INFINITY;
  for (int part = lane; part < parts.count; part += kWarp) peak = fmaxf(peak, parts.peak(part, row));
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) peak = fmaxf(peak, shuffle_xor(peak, lanes));
  const float base = peak == -INFINITY ? 0.f : peak;
  float weight = 0.f;
  for (int part = lane; part < parts.count; part += kWarp) {
    weight += parts.weight(part, row) * power_of_two(parts.peak(part, row) - base);
  }
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) weight += shuffle_xor(weight, lanes);
  const Extent extent = extent_of(problem, unit.sequence);
  float *sums_of_warps = reinterpret_cast<float *>(shared_memory());  // [kRowMergers][D], unless one warp has the row
  for (int column = 4 * lane; column < Shape::kHeadDim; column += 4 * kWarp) {
    float sum[4] = {};
#pragma unroll 8
    for (int part = warp % kRowMergers; part < parts.count; part += kRowMergers) {
      const float alpha = power_of_two(parts.peak(part, row) - base);
      const Sums sums = *reinterpret_cast<const Sums *>(parts.at(part) + row * Shape::kHeadDim + column);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += sums.values[c] * alpha;
    }
    if (kRowMergers == 1) {
      write_out<Shape>(problem, extent, unit, row, column, sum, weight);
    } else {
      store_sums(sums_of_warps + warp * Shape::kHeadDim + column, sum);
    }
  }
  if (kRowMergers == 1) return;
  sync_block();
  for (int column = 4 * thread_index(); column < Shape::kHeadDim; column += 4 * kThreads) {
    float sum[4] = {};
#pragma unroll
    for (int other = 0; other < kRowMergers; ++other) {
      const Sums sums = *reinterpret_cast<const Sums *>(sums_of_warps + other * Shape::kHeadDim + column);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += sums.values[c];
    }
    write_out<Shape>(problem, extent, unit, row, column, sum, weight);
  }
}

}  // namespace redraft
