// The entries of ONNX Runtime's stable C interface that the operators use. Its packages carry no headers.
//
// ONNX Runtime only appends to the table of entries, so an entry keeps its position in all later versions. The layouts
// below are those of version 17 (ONNX Runtime 1.17), and kApiVersion is what `GetApi` must be asked for.

#pragma once

#include <stddef.h>
#include <stdint.h>

struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtStatus;  // null: success
struct OrtTensorInfo;
struct OrtValue;

constexpr uint32_t kApiVersion = 17;
constexpr char kFirstRelease[] = "1.17";
enum OrtErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum OrtElementType : int { kFloat = 1, kUint8 = 2, kInt32 = 6, kInt64 = 7, kBool = 9, kFloat16 = 10 };
enum OrtPresence : int { kRequired = 0, kOptional = 1 };

// Each unused_N is the gap before the entry at position N.
struct OrtApi {
  OrtStatus *(*CreateStatus)(OrtErrorCode, const char *message);
  void *unused_26[25];
  OrtStatus *(*CreateCustomOpDomain)(const char *name, OrtCustomOpDomain **);
  OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *, const struct OrtCustomOp *);
  OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *, OrtCustomOpDomain *);
  void *unused_51[22];
  OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
  void *unused_60[8];
  OrtStatus *(*GetTensorElementType)(const OrtTensorInfo *, OrtElementType *);
  OrtStatus *(*GetDimensionsCount)(const OrtTensorInfo *, size_t *);
  OrtStatus *(*GetDimensions)(const OrtTensorInfo *, int64_t *, size_t count);
  void *unused_65[2];
  OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorInfo **);
  void *unused_85[19];
  OrtStatus *(*KernelInfoGetAttribute_float)(const OrtKernelInfo *, const char *name, float *);
  OrtStatus *(*KernelInfoGetAttribute_int64)(const OrtKernelInfo *, const char *name, int64_t *);
  void *unused_90[3];
  OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *, size_t index, const OrtValue **);  // null: absent
  OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *, size_t index, const int64_t *, size_t count, OrtValue **);
  void *unused_99[7];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorInfo *);
  void *unused_230[130];
  OrtStatus *(*KernelInfo_GetInputCount)(const OrtKernelInfo *, size_t *);
  void *unused_232[1];
  OrtStatus *(*KernelInfo_GetInputName)(const OrtKernelInfo *, size_t index, char *, size_t *bytes);
  void *unused_249[16];
  OrtStatus *(*KernelInfoGetConstantInput_tensor)(const OrtKernelInfo *, size_t, int *is_constant, const OrtValue **);
  void *unused_274[24];
  // Calls run(data, 0) .. run(data, total - 1) on the session's threads and returns after the last. batches: 0.
  OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *, void (*run)(void *, size_t), size_t total,
                                          size_t batches, void *data);
};

#define REDRAFT_AT(entry, position) static_assert(offsetof(OrtApi, entry) == (position) * sizeof(void *))
REDRAFT_AT(CreateCustomOpDomain, 26);
REDRAFT_AT(GetTensorMutableData, 51);
REDRAFT_AT(GetTensorElementType, 60);
REDRAFT_AT(GetTensorTypeAndShape, 65);
REDRAFT_AT(KernelInfoGetAttribute_float, 85);
REDRAFT_AT(KernelInfoGetAttribute_int64, 86);
REDRAFT_AT(KernelContext_GetInput, 90);
REDRAFT_AT(ReleaseTensorTypeAndShapeInfo, 99);
REDRAFT_AT(KernelInfo_GetInputCount, 230);
REDRAFT_AT(KernelInfo_GetInputName, 232);
REDRAFT_AT(KernelInfoGetConstantInput_tensor, 249);
REDRAFT_AT(KernelContext_ParallelFor, 274);
#undef REDRAFT_AT

struct OrtApiBase {
  const OrtApi *(*GetApi)(uint32_t version);  // null: this ONNX Runtime is older
  const char *(*GetVersionString)();
};

// What an operator is, and its kernel's functions. Unnamed fields are optional and null.
struct OrtCustomOp {
  uint32_t version;
  void *unused_create;
  const char *(*GetName)(const OrtCustomOp *);
  const char *(*GetExecutionProviderType)(const OrtCustomOp *);  // null: the CPU
  OrtElementType (*GetInputType)(const OrtCustomOp *, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp *);
  OrtElementType (*GetOutputType)(const OrtCustomOp *, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp *);
  void *unused_compute;
  void (*KernelDestroy)(void *kernel);
  OrtPresence (*GetInputCharacteristic)(const OrtCustomOp *, size_t index);
  OrtPresence (*GetOutputCharacteristic)(const OrtCustomOp *, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp *, size_t index);
  void *unused_variadic[4];
  OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **kernel);
  OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *);
  void *unused_infer_shape;
  int (*GetStartVersion)(const OrtCustomOp *);
  int (*GetEndVersion)(const OrtCustomOp *);
};
