// Quantized activations: groups of rows (groups.h) one after the other, of each group for each block of inputs
//
//   a_scale [rows] fp32
//   the sum of q [rows] int32, times minus the zero point, or minus one if columns have their own
//   q [block / 4, rows, 4] int8; if wide int16, those of 4 inputs in the order 0, 2, 1, 3

#pragma once

#include <stdint.h>
#include <string.h>

#include "groups.h"
#include "packed.h"

namespace {

using redraft::products::kMostInBlock;
using redraft::products::Packed;

template <class Input>
int64_t row_bytes(const Packed &m) {
  return m.blocks * static_cast<int64_t>(8 + m.block * sizeof(Input));
}

constexpr int32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;

inline float as_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

#if defined(__AVX2__)
#include "quantize_avx2.h"
#endif

namespace {

#if !defined(__AVX2__)
// Quantizes one block of a row, in the order of the scratch. Returns its scale.
template <class Input>
float quantize_block(const float *x, int block, Input *q, int32_t *sum) {
  constexpr float kRound = 0x1.8p23f;  // added to a small number, leaves the nearest integer in the low bits
  uint32_t bits[kMostInBlock], round;
  memcpy(bits, x, block * sizeof *x);
  memcpy(&round, &kRound, sizeof round);
  int32_t largest_bits = 0;  // compared as integers, since a NaN is then the largest
  for (int i = 0; i < block; ++i) {
    const auto size = static_cast<int32_t>(bits[i] & 0x7fffffff);
    largest_bits = size > largest_bits ? size : largest_bits;
  }
  *sum = 0;
  if (largest_bits >= kInfinity) {
    memset(q, 0, block * sizeof *q);
    return as_float(kNan);
  }
  const float scale = as_float(largest_bits) / 127, divisor = scale > 0 ? scale : 1;
  int32_t whole[kMostInBlock];
  for (int i = 0; i < block; ++i) {
    float value = x[i] / divisor;  // past 127 where the scale is denormal
    value = value > 127 ? 127 : value;
    value = (value < -127 ? -127 : value) + kRound;
    uint32_t rounded;
    memcpy(&rounded, &value, sizeof rounded);
    whole[i] = static_cast<int32_t>(rounded - round);
    *sum += whole[i];
  }
  for (int i = 0; i < block; ++i) q[i] = static_cast<Input>(whole[i]);
  return scale;
}
#endif

// `group` is the scratch of a group of `rows` rows, `row` one of them. factor: of the sums.
template <class Input>
void quantize_row(const Packed &m, const float *x, int32_t factor, int64_t unit, uint8_t *group, int64_t rows,
                  int64_t row) {
  if (unit > m.block) unit = m.block;
  const int64_t bytes = unit * sizeof(Input);
  for (int64_t first = 0; first < m.k; first += m.block) {
    float padded[kMostInBlock];
    Input q[kMostInBlock];
    const float *values = x + first;
    if (m.k - first < m.block) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, values, (m.k - first) * sizeof *x);
      values = padded;
    }
    int32_t sum;
    const float scale = m.block == 32 ? quantize_block(values, 32, q, &sum) : quantize_block(values, m.block, q, &sum);
    sum *= factor;
    memcpy(group + 4 * row, &scale, 4);
    memcpy(group + 4 * (rows + row), &sum, 4);
    group += 8 * rows;
    if (unit == 4) {
      constexpr int64_t kBytes = 4 * sizeof(Input);
      for (int64_t i = 0; i < m.block; i += 4, group += rows * kBytes) memcpy(group + row * kBytes, q + i, kBytes);
    } else {
      for (int64_t i = 0; i < m.block; i += unit, group += rows * bytes) memcpy(group + row * bytes, q + i, bytes);
    }
  }
}

}  // namespace
