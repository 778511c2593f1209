// The operator's attributes in a plugin, and their conversion to and from TensorRT's plugin fields.

#pragma once

#include <NvInferRuntime.h>

#include <array>

namespace redraft {

// All that a plugin needs except tensors. The first five are the attributes of redraft::TreeAttention
// (export/graph/tree_attention.py). The last two describe the device that built the engine, 0 if unknown.
struct Attributes {
  float scale = 1.f;
  float softcap = 0.f;
  int32_t window = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t multiprocessors = 0;
  int32_t compute_capability = 0;  // 90 for 9.0
};

constexpr int kOperatorFields = 5;  // in a graph
constexpr int kFields = 7;          // in a plan
using Fields = std::array<nvinfer1::PluginField, kFields>;

// Fields that point into `attributes`, in the order of the struct.
Fields fields_of(const Attributes &attributes);

// Reads fields in any order; integers may have 32 or 64 bits. The first `needed` fields must exist, and all names must
// be in kFields. Otherwise logs the reason and returns false.
bool read_fields(const nvinfer1::PluginFieldCollection *collection, int needed, Attributes *attributes);

}  // namespace redraft
