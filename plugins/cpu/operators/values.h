// Reads of tensors and attributes through ONNX Runtime's entries, with errors as exceptions.

#pragma once

#include <stdexcept>
#include <vector>

#include "onnxruntime_api.h"

namespace redraft::operators {

// A status of ONNX Runtime, on its way back to it. It has one owner, the function that catches it.
struct Failed {
  OrtStatus *status;
};

inline void check(OrtStatus *status) {
  if (status != nullptr) throw Failed{status};
}

// The operator refuses a node or a call; what() has what it expected and what it found.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Tensor {
  Tensor(const OrtApi &api, const OrtValue *value);
  int64_t count() const;  // of elements

  OrtElementType type = kFloat;
  std::vector<int64_t> shape;
  const void *data = nullptr;
};

int64_t attribute(const OrtApi &api, const OrtKernelInfo *info, const char *name);
float float_attribute(const OrtApi &api, const OrtKernelInfo *info, const char *name);

// True if the node has this input. An optional one before another may have an empty name.
bool has_input(const OrtApi &api, const OrtKernelInfo *info, size_t index);

// Returns an input of a call, null for an optional one that the node does not have.
const OrtValue *input(const OrtApi &api, const OrtKernelContext *context, size_t index);

}  // namespace redraft::operators
