// The platform of the kernels (tree_attention/platform.cuh) in terms of cuda_on_cpu.

#pragma once

namespace redraft {

inline unsigned char *shared_memory() { return cuda_on_cpu::shared_memory(); }
inline int thread_index() { return cuda_on_cpu::here.thread; }
inline int block_index() { return cuda_on_cpu::here.block; }
inline int block_index_y() { return cuda_on_cpu::here.block_y; }
inline int block_count() { return cuda_on_cpu::here.blocks; }
inline int block_count_y() { return cuda_on_cpu::here.blocks_y; }
inline int block_threads() { return cuda_on_cpu::here.threads; }
inline void sync_block() { cuda_on_cpu::sync_block(); }
inline float power_of_two(float exponent) { return exp2f(exponent); }

template <class T>
T lane_value(const cuda_on_cpu::Lanes &lanes, int lane, int index = 0) {
  T value;
  memcpy(&value, lanes.bytes[lane] + index * sizeof(T), sizeof(T));
  return value;
}

inline float shuffle_xor(float value, int lanes) {
  const int lane = thread_index() % kWarp;
  return lane_value<float>(cuda_on_cpu::exchange(&value, sizeof value), lane ^ lanes);
}

inline uint32_t ballot(bool given) {
  const cuda_on_cpu::Lanes &lanes = cuda_on_cpu::exchange(&given, sizeof given);
  uint32_t bits = 0;
  for (int lane = 0; lane < kWarp; ++lane) bits |= static_cast<uint32_t>(lane_value<bool>(lanes, lane)) << lane;
  return bits;
}

inline void copy_async(void *target, const void *source, bool valid) { cuda_on_cpu::copy_async(target, source, valid); }
inline void commit_copies() { cuda_on_cpu::commit_copies(); }
template <int kPending>
void wait_copies() {
  cuda_on_cpu::wait_copies(kPending);
}

// Lane 4 g + t receives row g, columns 2 t and 2 t + 1 of each 8x8 matrix.
inline void load_matrices(uint32_t (&to)[4], const void *row) {
  cuda_on_cpu::check_shared("ldmatrix's row", row);
  const cuda_on_cpu::Lanes &rows = cuda_on_cpu::exchange(&row, sizeof row);
  const int lane = thread_index() % kWarp;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto *from = lane_value<const unsigned char *>(rows, matrix * 8 + lane / 4);
    memcpy(&to[matrix], from + lane % 4 * 4, 4);
  }
}

// Transposed: row and column are exchanged.
inline void load_matrices_transposed(uint32_t (&to)[4], const void *row) {
  cuda_on_cpu::check_shared("ldmatrix's row", row);
  const cuda_on_cpu::Lanes &rows = cuda_on_cpu::exchange(&row, sizeof row);
  const int lane = thread_index() % kWarp;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      memcpy(&pair[i], lane_value<const unsigned char *>(rows, matrix * 8 + lane % 4 * 2 + i) + lane / 4 * 2, 2);
    }
    memcpy(&to[matrix], pair, 4);
  }
}

template <class T>
float to_float(uint16_t bits);
template <>
inline float to_float<Half>(uint16_t bits) {
  return cuda_on_cpu::half_to_float(bits);
}
template <>
inline float to_float<Bfloat16>(uint16_t bits) {
  return cuda_on_cpu::bfloat16_to_float(bits);
}

template <class T>
uint32_t pack(float low, float high);
template <>
inline uint32_t pack<Half>(float low, float high) {
  return cuda_on_cpu::float_to_half(low) | static_cast<uint32_t>(cuda_on_cpu::float_to_half(high)) << 16;
}
template <>
inline uint32_t pack<Bfloat16>(float low, float high) {
  return cuda_on_cpu::float_to_bfloat16(low) | static_cast<uint32_t>(cuda_on_cpu::float_to_bfloat16(high)) << 16;
}

inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// A lane's words of a matrix product's operands: a[0 .. 3], then b[0 .. 1].
struct Operands {
  uint32_t words[6];
};

// Adds a[row] . b[column] for the four sums of this lane. Lane 4 g + t holds `word(row_or_column, k)` of an operand:
//   a, 16-bit   word (row >= 8) + 2 (k >= 8), half k % 2, t = k % 8 / 2
//   a, TF32     word (row >= 8) + 2 (k >= 4), t = k % 4
//   b           word 4 + the same choice by k
template <int kDepth, class Value>
void add_products(float (&sum)[4], const cuda_on_cpu::Lanes &lanes, Value value) {
  constexpr int kBlock = 4;  // products that the first tensor cores add at once, and later ones of TF32
  const bool truncated = cuda_on_cpu::sums() == cuda_on_cpu::Sums::kTruncated;
  const int lane = thread_index() % kWarp;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    float total = sum[i];
    double terms[1 + kBlock];
    for (int k = 0; k < kDepth; ++k) {
      const int upper = k >= kDepth / 2;
      const float a = value(lanes, row % 8, k % (kDepth / 2), row / 8 + 2 * upper);
      const float b = value(lanes, column, k % (kDepth / 2), 4 + upper);
      if (!truncated) {
        total += a * b;
        continue;
      }
      terms[1 + k % kBlock] = static_cast<double>(a) * b;
      if (k % kBlock < kBlock - 1) continue;
      terms[0] = total;
      total = cuda_on_cpu::truncated_sum(terms, 1 + kBlock);
    }
    sum[i] = total;
  }
}

template <class T>
void multiply_add_k16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Operands mine{{a[0], a[1], a[2], a[3], b0, b1}};
  add_products<16>(sum, cuda_on_cpu::exchange(&mine, sizeof mine),
                   [](const cuda_on_cpu::Lanes &lanes, int g, int k, int word) {
                     return to_float<T>(lane_value<uint16_t>(lanes, 4 * g + k / 2, 2 * word + k % 2));
                   });
}

inline void multiply_add_k8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Operands mine{{a[0], a[1], a[2], a[3], b0, b1}};
  add_products<8>(sum, cuda_on_cpu::exchange(&mine, sizeof mine),
                  [](const cuda_on_cpu::Lanes &lanes, int g, int k, int word) {
                    return bits_to_float(lane_value<uint32_t>(lanes, 4 * g + k, word));
                  });
}

inline uint32_t round_tf32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return value == value ? (bits + 0x1000) & 0xffffe000u : bits;
}

}  // namespace redraft
