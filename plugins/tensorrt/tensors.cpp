#include "tensors.h"

#include <algorithm>
#include <string>

#include "log.h"

namespace redraft {

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

constexpr const char *kNames[kTensors] = {"q",           "k",         "v",           "key_cache",
                                          "value_cache", "tree_mask", "positions",   "cache_len",
                                          "kv_len",      "out",       "present_key", "present_value"};
constexpr int kRanks[kInputs] = {3, 3, 3, 4, 4, 3, 2, 1, 1};

// No known device runs more blocks with any of the kernels: 256 multiprocessors of eight.
constexpr int kMostBlocks = 2048;
// Query rows of the second largest tile. More nodes than this change neither the tile nor the partial results.
constexpr int kMiddleRows = 32;

int element_code(DataType type) {
  switch (type) {
    case DataType::kHALF: return REDRAFT_FLOAT16;
    case DataType::kBF16: return REDRAFT_BFLOAT16;
    case DataType::kFLOAT: return REDRAFT_FLOAT32;
    default: return -1;
  }
}

std::string text_of(const Dims &dims) {
  std::string text = "[";
  for (int i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
  return text + "]";
}

bool agree(const Dims &expected, const Dims &found) {
  if (expected.nbDims != found.nbDims) return false;
  for (int i = 0; i < expected.nbDims; ++i) {
    if (expected.d[i] >= 0 && found.d[i] >= 0 && expected.d[i] != found.d[i]) return false;
  }
  return true;
}

// Scratch of one call under a mask of bytes.
int scratch_bytes(redraft_tree_attention_args args, int blocks, size_t *bytes) {
  static const uint8_t mask = 0;
  args.mask_bools = &mask;
  args.ctas = blocks;
  return redraft_tree_attention_workspace(&args, bytes);
}

}  // namespace

bool supported_type(int tensor, DataType type, DataType q_type) {
  switch (tensor) {
    case kQ: return element_code(type) >= 0;
    case kTreeMask: return type == DataType::kBOOL;
    case kPositions:
    case kPastLen:
    case kKvLen: return type == DataType::kINT64;
    default: return type == q_type;
  }
}

bool read_sizes(const Dims *dims, DataType type, const Attributes &attributes, redraft_tree_attention_args *args) {
  for (int i = 0; i < kInputs; ++i) {
    if (dims[i].nbDims != kRanks[i]) {
      return refuse("%s: expected %d dimensions, found %s", kNames[i], kRanks[i], text_of(dims[i]).c_str());
    }
  }
  const int64_t batch = dims[kQ].d[0];
  const int64_t nodes = dims[kQ].d[1];
  const int64_t capacity = dims[kKeyCache].d[2];
  const int64_t head_dim = dims[kKeyCache].d[3];
  if (head_dim < 0) return refuse("key_cache: expected a fixed head size, found %s", text_of(dims[kKeyCache]).c_str());
  const int64_t kv_heads = attributes.kv_heads;
  const Dims rows{3, {batch, nodes, kv_heads * head_dim}};
  const Dims cache{4, {batch, kv_heads, capacity, head_dim}};
  const Dims expected[kInputs] = {{3, {batch, nodes, attributes.q_heads * head_dim}},
                                  rows,
                                  rows,
                                  cache,
                                  cache,
                                  {3, {batch, nodes, nodes}},
                                  {2, {batch, nodes}},
                                  {1, {batch}},
                                  {1, {1}}};
  for (int i = 0; i < kInputs; ++i) {
    if (!agree(expected[i], dims[i])) {
      return refuse("%s: expected %s with q_heads = %d, kv_heads = %d and head size %d, found %s", kNames[i],
                    text_of(expected[i]).c_str(), attributes.q_heads, attributes.kv_heads, static_cast<int>(head_dim),
                    text_of(dims[i]).c_str());
    }
  }
  *args = redraft_tree_attention_args{};
  args->dtype = element_code(type);
  args->batch = static_cast<int32_t>(batch < 0 ? 1 : batch);
  args->nodes = static_cast<int32_t>(nodes < 0 ? 1 : nodes);
  args->q_heads = attributes.q_heads;
  args->kv_heads = attributes.kv_heads;
  args->head_dim = static_cast<int32_t>(head_dim);
  args->capacity = static_cast<int32_t>(capacity < 0 ? args->nodes : capacity);
  args->window = attributes.window;
  args->scale = attributes.scale;
  args->softcap = attributes.softcap;
  // With given blocks, the entry needs no device and checks the sizes.
  size_t bytes = 0;
  const bool fits = scratch_bytes(*args, 1, &bytes) == REDRAFT_OK;
  return fits || refuse("%s", redraft_last_error());
}

size_t workspace_for_up_to(redraft_tree_attention_args args) {
  size_t most = 0;
  const int nodes = args.nodes;
  for (int count = 1; count <= nodes; count = count <= kMiddleRows ? count + 1 : nodes) {
    args.nodes = count;
    size_t bytes = 0;
    int status = scratch_bytes(args, 0, &bytes);
    if (status == REDRAFT_DEVICE_ERROR) status = scratch_bytes(args, kMostBlocks, &bytes);
    if (status != REDRAFT_OK) refuse("%s", redraft_last_error());
    most = std::max(most, bytes);
    if (count == nodes) break;
  }
  return most;
}

}  // namespace redraft
