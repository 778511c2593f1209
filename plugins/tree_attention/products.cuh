// Products of one warp on tensor cores: scores of 16 queries with the keys of its slice, and the weighted values.
//
// Sums have the instruction's layout: lane 4 g + t holds rows g and g + 8, columns 2 t and 2 t + 1 of the 16 x 8
// block n, in sums[n][0 .. 1] and sums[n][2 .. 3]. 16-bit elements use m16n8k16. float uses m16n8k8 on TF32 halves:
// x = big + small, and big*big + big*small + small*big has an error near float's own (Ootomo and Yokota 2022, without
// their correction of the tensor cores' rounding). A magnitude that rounds up to infinity in TF32, from 3.4e38 on,
// gives NaN.

#pragma once

#include "shape.cuh"

namespace redraft {

REDRAFT_DEVICE int lane_of() { return thread_index() % kWarp; }

struct SplitTf32 {
  uint32_t big;
  uint32_t small;
};

REDRAFT_DEVICE SplitTf32 split(float value) {
  SplitTf32 parts;
  parts.big = round_tf32(value);
  parts.small = round_tf32(value - bits_to_float(parts.big));
  return parts;
}

REDRAFT_DEVICE void multiply_add_split(float (&sum)[4], const SplitTf32 (&a)[4], SplitTf32 b0, SplitTf32 b1) {
  const uint32_t big[4] = {a[0].big, a[1].big, a[2].big, a[3].big};
  const uint32_t small[4] = {a[0].small, a[1].small, a[2].small, a[3].small};
  multiply_add_k8(sum, small, b0.big, b1.big);
  multiply_add_k8(sum, big, b0.small, b1.small);
  multiply_add_k8(sum, big, b0.big, b1.big);
}

template <class Shape, class T = typename Shape::Element>
struct Products;

// 16-bit elements.
template <class Shape, class T>
struct Products {
  static constexpr int kBlocks = Shape::kSlice / 8;
  static constexpr int kOutBlocks = Shape::kHeadDim / 8;

  // scores [16, kSlice] = queries [16, D] keys [kSlice, D]^T
  static REDRAFT_DEVICE void scores(float (&sums)[kBlocks][4], const T *queries, const T *keys) {
    const int lane = lane_of();
    const T *query_row = queries + (lane % 16) * Shape::kStride + lane / 16 * 8;
    const T *key_row = keys + (lane / 16 * 8 + lane % 8) * Shape::kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < Shape::kHeadDim; k += 16) {
      uint32_t a[4];
      load_matrices(a, query_row + k);
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        uint32_t b[4];
        load_matrices(b, key_row + n * 8 * Shape::kStride + k);
        multiply_add_k16<T>(sums[n], a, b[0], b[1]);
        multiply_add_k16<T>(sums[n + 1], a, b[2], b[3]);
      }
    }
  }

  // out [16, D] += weights [16, kSlice] values [kSlice, D]; weights have the layout of scores() sums, which the
  // product takes.
  static REDRAFT_DEVICE void values(float (&out)[kOutBlocks][4], const float (&weights)[kBlocks][4], const T *values) {
    const int lane = lane_of();
    const T *value_row = values + (lane / 8 % 2 * 8 + lane % 8) * Shape::kStride + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kBlocks; k += 2) {
      const uint32_t a[4] = {pack<T>(weights[k][0], weights[k][1]), pack<T>(weights[k][2], weights[k][3]),
                             pack<T>(weights[k + 1][0], weights[k + 1][1]),
                             pack<T>(weights[k + 1][2], weights[k + 1][3])};
#pragma unroll
      for (int n = 0; n < kOutBlocks; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, value_row + k * 8 * Shape::kStride + n * 8);
        multiply_add_k16<T>(out[n], a, b[0], b[1]);
        multiply_add_k16<T>(out[n + 1], a, b[2], b[3]);
      }
    }
  }
};

template <class Shape>
struct Products<Shape, float> {
  static constexpr int kBlocks = Shape::kSlice / 8;
  static constexpr int kOutBlocks = Shape::kHeadDim / 8;

  static REDRAFT_DEVICE void scores(float (&sums)[kBlocks][4], const float *queries, const float *keys) {
    const int g = lane_of() / 4;
    const int t = lane_of() % 4;
    const float *query_row = queries + g * Shape::kStride + t;
    const float *key_row = keys + g * Shape::kStride + t;
#pragma unroll 4
    for (int k = 0; k < Shape::kHeadDim; k += 8) {
      const SplitTf32 a[4] = {split(query_row[k]), split(query_row[8 * Shape::kStride + k]), split(query_row[k + 4]),
                              split(query_row[8 * Shape::kStride + k + 4])};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float *key = key_row + n * 8 * Shape::kStride + k;
        multiply_add_split(sums[n], a, split(key[0]), split(key[4]));
      }
    }
  }

  // Lane 4 g + t holds the weights of keys 2 t and 2 t + 1, but the product takes keys t and t + 4. Both operands use
  // the lane's order of keys, which does not change the sum.
  static REDRAFT_DEVICE void values(float (&out)[kOutBlocks][4], const float (&weights)[kBlocks][4],
                                    const float *values) {
    const int g = lane_of() / 4;
    const int t = lane_of() % 4;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      const SplitTf32 a[4] = {split(weights[k][0]), split(weights[k][2]), split(weights[k][1]), split(weights[k][3])};
      const float *value = values + (k * 8 + 2 * t) * Shape::kStride + g;
#pragma unroll
      for (int n = 0; n < kOutBlocks; ++n) {
        multiply_add_split(out[n], a, split(value[n * 8]), split(value[Shape::kStride + n * 8]));
      }
    }
  }
};

}  // namespace redraft
