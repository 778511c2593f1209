// The operator's attributes as a plugin keeps them, and their way through TensorRT's plugin fields.

#pragma once

#include <NvInferRuntime.h>

#include <array>

namespace redraft {

// What a plugin needs besides tensors. The first five are the attributes of redraft::TreeAttention
// (export/tree_attention.py); the last two are where the engine was built, 0 where that is not known.
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

// Reads fields of any order; integers may be of 32 or 64 bits. All of `needed` first ones must be there, and no other
// names than those of kFields. Logs what is wrong and returns false.
bool read_fields(const nvinfer1::PluginFieldCollection *collection, int needed, Attributes *attributes);

}  // namespace redraft
