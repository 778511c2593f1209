#include "values.h"

namespace redraft::operators {

Tensor::Tensor(const OrtApi &api, const OrtValue *value) {
  OrtTensorInfo *info = nullptr;
  check(api.GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatus *failed = api.GetTensorElementType(info, &type);
  if (failed == nullptr) failed = api.GetDimensionsCount(info, &rank);
  if (failed == nullptr) {
    shape.resize(rank);
    failed = api.GetDimensions(info, shape.data(), rank);
  }
  api.ReleaseTensorTypeAndShapeInfo(info);
  check(failed);
  void *memory = nullptr;
  check(api.GetTensorMutableData(const_cast<OrtValue *>(value), &memory));  // version 17 has no entry for reading
  data = memory;
}

int64_t Tensor::count() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

int64_t attribute(const OrtApi &api, const OrtKernelInfo *info, const char *name) {
  int64_t value = 0;
  check(api.KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

float float_attribute(const OrtApi &api, const OrtKernelInfo *info, const char *name) {
  float value = 0;
  check(api.KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

bool has_input(const OrtApi &api, const OrtKernelInfo *info, size_t index) {
  size_t count = 0;
  check(api.KernelInfo_GetInputCount(info, &count));
  if (index >= count) return false;
  size_t bytes = 0;  // of the name and its terminator
  check(api.KernelInfo_GetInputName(info, index, nullptr, &bytes));
  return bytes > 1;
}

const OrtValue *input(const OrtApi &api, const OrtKernelContext *context, size_t index) {
  const OrtValue *value = nullptr;
  check(api.KernelContext_GetInput(context, index, &value));
  return value;
}

}  // namespace redraft::operators
