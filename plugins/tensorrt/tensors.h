// Shapes and types of the operator's tensors in TensorRT's terms.

#pragma once

#include <NvInferRuntime.h>

#include "../tree_attention/tree_attention.h"
#include "attributes.h"

namespace redraft {

// In the order of redraft::TreeAttention (export/graph/tree_attention.py).
enum Tensor {
  kQ,
  kK,
  kV,
  kKeyCache,
  kValueCache,
  kTreeMask,
  kPositions,
  kPastLen,
  kKvLen,
  kOut,
  kPresentKey,
  kPresentValue,
  kTensors,
};
constexpr int kInputs = kOut;
constexpr int kOutputs = kTensors - kInputs;

// Returns true if tensor number `tensor` may have this type with q of type `q_type`.
bool supported_type(int tensor, nvinfer1::DataType type, nvinfer1::DataType q_type);

// Reads sizes and element type of a call from `dims` of the kInputs inputs, with all pointers null. Checks them against
// each other and against the kernels' limits; -1 agrees with all. Otherwise logs the reason and returns false.
bool read_sizes(const nvinfer1::Dims *dims, nvinfer1::DataType type, const Attributes &attributes,
                redraft_tree_attention_args *args);

// Scratch bytes that suffice for 1 to `args.nodes` nodes on this device or, without a device, on any. Fewer nodes can
// need more: their tiles are smaller, and more blocks run at once.
size_t workspace_for_up_to(redraft_tree_attention_args args);

}  // namespace redraft
