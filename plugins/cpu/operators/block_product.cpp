#include "block_product.h"

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../products/products.h"
#include "file_pages.h"
#include "shares.h"
#include "values.h"

namespace redraft::operators {
namespace {

constexpr size_t kLine = 64;                  // alignment of packed weights and scratch memory, in bytes
constexpr int64_t kQuantizedShare = 1 << 13;  // activations that are worth waking a thread for

struct FreeAligned {
  void operator()(void *memory) const { free(memory); }
};

size_t in_lines(int64_t bytes) { return (static_cast<size_t>(bytes) + kLine - 1) / kLine * kLine; }

void *aligned(int64_t bytes) {
  void *memory = aligned_alloc(kLine, std::max(in_lines(bytes), kLine));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Scratch memory of the calling thread, valid until its next call. All kernels of all sessions share it, since a thread
// runs one at a time. It grows to the largest call; ONNX Runtime's arena would keep as much and takes a lock for each call.
void *thread_scratch(int64_t bytes) {
  thread_local std::unique_ptr<void, FreeAligned> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset();
    size = 0;
    memory.reset(aligned(bytes));
    size = bytes;
  }
  return memory.get();
}

// Returns the bytes of an input that is a constant of `count` elements.
template <typename T>
const T *constant(const OrtApi &api, const OrtKernelInfo *info, Input input, OrtElementType type, int64_t count) {
  static const char *const kNames[] = {"A", "B", "scales", "zero_points", "g_idx", "bias"};
  const std::string name = kNames[input];
  int is_constant = 0;
  const OrtValue *value = nullptr;
  check(api.KernelInfoGetConstantInput_tensor(info, input, &is_constant, &value));
  if (!is_constant || value == nullptr) throw Refused(name + " must be an initializer");
  const Tensor tensor(api, value);
  if (tensor.type != type) throw Refused(name + " has another element type than expected");
  if (tensor.count() != count) {
    throw Refused(name + ": expected " + std::to_string(count) + " elements, found " + std::to_string(tensor.count()));
  }
  return static_cast<const T *>(tensor.data);
}

constexpr int64_t kSums = 16;  // that a block's numbers are first added to; the smallest block has as many

// Copies a row of x, and appends the sums of its blocks.
void append_sums(const float *x, int64_t inputs, int64_t block, float *row) {
  std::copy_n(x, inputs, row);
  for (float *sum = row + inputs; inputs > 0; inputs -= block, x += block, ++sum) {
    float sums[kSums];
    std::copy_n(x, kSums, sums);
    for (int64_t begin = kSums; begin < block; begin += kSums) {
      for (int64_t i = 0; i < kSums; ++i) sums[i] += x[begin + i];
    }
    for (int64_t half = kSums / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[half + i];
    }
    *sum = sums[0];
  }
}

}  // namespace

void BlockProduct::Free::operator()(void *memory) const { free(memory); }

BlockProduct::BlockProduct(const OrtApi &api, const OrtKernelInfo *info, bool appends_sums) : api_(api) {
  n_ = attribute(api, info, "N");
  k_ = attribute(api, info, "K");
  const int64_t bits = attribute(api, info, "bits"), block = attribute(api, info, "block_size");
  if (n_ <= 0 || k_ <= 0) {
    throw Refused("N and K: expected positive numbers, found " + std::to_string(n_) + " and " + std::to_string(k_));
  }
  redraft_block_matrix matrix{};
  matrix.n = n_;
  matrix.k = k_;
  matrix.bits = static_cast<int32_t>(std::clamp<int64_t>(bits, 0, INT32_MAX));
  matrix.block = static_cast<int32_t>(std::clamp<int64_t>(block, 0, INT32_MAX));
  const int64_t packed_bytes = redraft_products_packed_bytes(&matrix);
  const std::string sizes = std::to_string(bits) + " bits, blocks of " + std::to_string(block);
  if (packed_bytes == 0) {
    throw Refused("expected weights of 4 or 8 bits in blocks of 16 to 256, a power of two; found " + sizes);
  }
  block_ = block;
  inputs_ = appends_sums ? k_ / (block + 1) * block : k_;
  if (appends_sums && k_ % (block + 1) != 0) {
    throw Refused("K: expected whole blocks of " + std::to_string(block) + " and their sums, found " +
                  std::to_string(k_));
  }
  const int64_t blocks = (k_ + block - 1) / block;
  matrix.codes = constant<uint8_t>(api, info, kCodes, kUint8, n_ * blocks * (block * bits / 8));
  matrix.scales = constant<float>(api, info, kScales, kFloat, n_ * blocks);
  if (has_input(api, info, kGroupIndex)) throw Refused("g_idx is not supported");
  const int64_t zeros = n_ * ((blocks * bits + 7) / 8);
  if (has_input(api, info, kZeroPoints)) {
    matrix.zero_points = constant<uint8_t>(api, info, kZeroPoints, kUint8, zeros);
  }
  packed_.reset(aligned(redraft_products_packed_bytes(&matrix)));
  if (redraft_products_pack(&matrix, packed_.get()) != 0) throw Refused("the weights were not packed: " + sizes);
  give_back_file_pages(matrix.codes, n_ * blocks * (block * bits / 8));
  give_back_file_pages(matrix.scales, n_ * blocks * static_cast<int64_t>(sizeof(float)));
}

void BlockProduct::compute(OrtKernelContext *context) const {
  const Tensor x(api_, input(api_, context, kX));
  if (x.shape.empty() || x.shape.back() != inputs_) {
    const std::string found = x.shape.empty() ? "a scalar" : std::to_string(x.shape.back());
    throw Refused("A: expected a last dimension of " + std::to_string(inputs_) + ", found " + found);
  }
  const float *bias = nullptr;
  if (const OrtValue *value = input(api_, context, kBias)) {
    const Tensor tensor(api_, value);
    if (tensor.count() != n_) {
      throw Refused("bias: expected " + std::to_string(n_) + " elements, found " + std::to_string(tensor.count()));
    }
    bias = static_cast<const float *>(tensor.data);
  }
  std::vector<int64_t> shape = x.shape;
  shape.back() = n_;
  OrtValue *result = nullptr;
  check(api_.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &result));
  const int64_t rows = x.count() / inputs_;
  if (rows == 0) return;
  void *y = nullptr;
  check(api_.GetTensorMutableData(result, &y));
  const auto *given = static_cast<const float *>(x.data);
  const void *packed = packed_.get();
  const size_t quantized = in_lines(redraft_products_scratch_bytes(packed, rows));
  const int64_t with_sums = inputs_ == k_ ? 0 : rows * k_ * static_cast<int64_t>(sizeof(float));
  void *scratch = thread_scratch(static_cast<int64_t>(quantized) + with_sums);
  float *wide = with_sums == 0 ? nullptr : reinterpret_cast<float *>(static_cast<char *>(scratch) + quantized);
  const int64_t k = k_, inputs = inputs_, block = block_;
  in_shares(api_, context, rows, rows * k_ / kQuantizedShare, [=](int64_t first, int64_t last) {
    for (int64_t row = first; wide != nullptr && row < last; ++row) {
      append_sums(given + row * inputs, inputs, block, wide + row * k);
    }
    redraft_products_quantize(packed, wide == nullptr ? given : wide, rows, first, last, scratch);
  });
  const int64_t tiles = redraft_products_tiles(packed), pairs = (tiles + 1) / 2;  // some kernels multiply two at once
  in_shares(api_, context, pairs, rows * n_ * k_ / kShare, [=](int64_t first, int64_t last) {
    const int64_t end = std::min(2 * last, tiles);
    redraft_products_multiply(packed, scratch, rows, bias, static_cast<float *>(y), 2 * first, end);
  });
}

}  // namespace redraft::operators
