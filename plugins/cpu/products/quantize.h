// Quantized activations: groups of rows (groups.h) one after the other, of each group for each block of inputs
//
//   a_scale [rows] fp32
//   minus the sum of q [rows] int32
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

template <class Input>
void store_four(uint8_t *to, const int32_t *q) {
  const bool wide = sizeof(Input) > 1;
  const Input four[4] = {static_cast<Input>(q[0]), static_cast<Input>(q[wide ? 2 : 1]),
                         static_cast<Input>(q[wide ? 1 : 2]), static_cast<Input>(q[3])};
  memcpy(to, four, sizeof four);
}

// Quantizes one block of a row. Returns its scale.
inline float quantize_block(const float *x, int64_t block, int32_t *q) {
  constexpr uint32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;
  constexpr float kRound = 0x1.8p23f;  // added to a small number, leaves the nearest integer in the low bits
  uint32_t bits[kMostInBlock], round;
  memcpy(bits, x, block * sizeof *x);
  memcpy(&round, &kRound, sizeof round);
  int32_t largest_bits = 0;  // compared as integers, since a NaN is then the largest
  for (int64_t i = 0; i < block; ++i) {
    const auto size = static_cast<int32_t>(bits[i] & 0x7fffffff);
    largest_bits = size > largest_bits ? size : largest_bits;
  }
  float largest, scale;
  if (largest_bits >= static_cast<int32_t>(kInfinity)) {
    memset(q, 0, block * sizeof *q);
    memcpy(&scale, &kNan, sizeof scale);
    return scale;
  }
  memcpy(&largest, &largest_bits, sizeof largest);
  scale = largest / 127;
  const float divisor = scale > 0 ? scale : 1;
  for (int64_t i = 0; i < block; ++i) {
    float value = x[i] / divisor;  // past 127 where the scale is denormal
    value = value > 127 ? 127 : value;
    value = (value < -127 ? -127 : value) + kRound;
    uint32_t rounded;
    memcpy(&rounded, &value, sizeof rounded);
    q[i] = static_cast<int32_t>(rounded - round);
  }
  return scale;
}

// `group` is the scratch of a group of `rows` rows, `row` one of them.
template <class Input>
void quantize_row(const Packed &m, const float *x, uint8_t *group, int64_t rows, int64_t row) {
  const int64_t unit = 4 * sizeof(Input);
  for (int64_t first = 0; first < m.k; first += m.block) {
    float padded[kMostInBlock];
    int32_t q[kMostInBlock];
    const float *values = x + first;
    if (m.k - first < m.block) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, values, (m.k - first) * sizeof *x);
      values = padded;
    }
    const float scale = quantize_block(values, m.block, q);
    int32_t sum = 0;
    for (int64_t i = 0; i < m.block; ++i) sum -= q[i];
    memcpy(group + 4 * row, &scale, 4);
    memcpy(group + 4 * (rows + row), &sum, 4);
    group += 8 * rows;
    for (int64_t i = 0; i < m.block; i += 4) store_four<Input>(group + (i / 4 * rows + row) * unit, q + i);
    group += m.block / 4 * rows * unit;
  }
}

}  // namespace
