// redraft::TreeAttention as a TensorRT plugin (IPluginV3), over the C entries of the kernels.
//
// TensorRT's ONNX parser looks a node up by op_type and by its attributes plugin_version and plugin_namespace, by
// default "1" and "". From 10.10 on, a node's domain is its namespace. The creator is registered as TreeAttention,
// version 1, in the empty namespace, so nodes for the parser have no domain (engines/tensorrt/prepare.py). The parser
// passes INT attributes as int32.
//
// The caller binds the network's inputs and outputs to one address, so that present_key and present_value are the
// caches themselves. Otherwise each call first copies the caches with their whole capacity. The plugin does not
// declare them as aliases (IPluginV3OneBuildV2::getAliasedInput), since TensorRT may then copy every cache itself.

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <stdio.h>

#include <atomic>
#include <new>

#include "attributes.h"
#include "log.h"
#include "tensors.h"

namespace redraft {

namespace {

using namespace nvinfer1;

constexpr const char *kName = "TreeAttention";
constexpr const char *kVersion = "1";
constexpr const char *kNamespace = "";
constexpr int kFailed = 1;

// Leaves both 0 without a device.
void find_device(int32_t *multiprocessors, int32_t *compute_capability) {
  int device = 0;
  int count = 0;
  int major = 0;
  int minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return;
  }
  *multiprocessors = count;
  *compute_capability = 10 * major + minor;
}

class TreeAttention final : public IPluginV3,
                            public IPluginV3OneCore,
                            public IPluginV3OneBuild,
                            public IPluginV3OneRuntime {
 public:
  TreeAttention(const Attributes &attributes, TensorRTPhase phase) : attributes_(attributes), phase_(phase) {
    snprintf(identity_, sizeof identity_, "scale=%a softcap=%a window=%d q_heads=%d kv_heads=%d", attributes.scale,
             attributes.softcap, attributes.window, attributes.q_heads, attributes.kv_heads);
  }

  IPluginCapability *getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore *>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild *>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime *>(this);
    }
    return nullptr;
  }

  IPluginV3 *clone() noexcept override {
    TreeAttention *copy = new (std::nothrow) TreeAttention(attributes_, phase_);
    if (copy) copy->blocks_ = blocks_;
    return copy;
  }

  // Core.

  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }

  // Build.

  int32_t getNbOutputs() const noexcept override { return kOutputs; }

  int32_t getOutputDataTypes(DataType *outputs, int32_t output_count, const DataType *inputs,
                             int32_t input_count) const noexcept override {
    if (!check_counts(input_count, output_count)) return kFailed;
    for (int i = 0; i < kOutputs; ++i) outputs[i] = inputs[kQ];
    return 0;
  }

  int32_t getOutputShapes(const DimsExprs *inputs, int32_t input_count, const DimsExprs *, int32_t, DimsExprs *outputs,
                          int32_t output_count, IExprBuilder &) noexcept override {
    if (!check_counts(input_count, output_count)) return kFailed;
    outputs[kOut - kInputs] = inputs[kQ];
    outputs[kPresentKey - kInputs] = inputs[kKeyCache];
    outputs[kPresentValue - kInputs] = inputs[kValueCache];
    return 0;
  }

  bool supportsFormatCombination(int32_t tensor, const DynamicPluginTensorDesc *tensors, int32_t input_count,
                                 int32_t output_count) noexcept override {
    if (!check_counts(input_count, output_count) || tensor < 0 || tensor >= kTensors) return false;
    const PluginTensorDesc &found = tensors[tensor].desc;
    return found.format == TensorFormat::kLINEAR && supported_type(tensor, found.type, tensors[kQ].desc.type);
  }

  // Checks the largest sizes of the profile.
  int32_t configurePlugin(const DynamicPluginTensorDesc *inputs, int32_t input_count, const DynamicPluginTensorDesc *,
                          int32_t output_count) noexcept override {
    redraft_tree_attention_args args;
    return check_counts(input_count, output_count) && read_largest(inputs, &args) ? 0 : kFailed;
  }

  size_t getWorkspaceSize(const DynamicPluginTensorDesc *inputs, int32_t input_count, const DynamicPluginTensorDesc *,
                          int32_t output_count) const noexcept override {
    redraft_tree_attention_args args;
    if (!check_counts(input_count, output_count) || !read_largest(inputs, &args)) return 0;
    return workspace_for_up_to(args);
  }

  // The attributes. TensorRT adds sizes and types to the key.
  const char *getTimingCacheID() noexcept override { return identity_; }
  const char *getMetadataString() noexcept override { return identity_; }

  // Run time.

  int32_t onShapeChange(const PluginTensorDesc *inputs, int32_t input_count, const PluginTensorDesc *,
                        int32_t output_count) noexcept override {
    redraft_tree_attention_args args;
    if (!check_counts(input_count, output_count) || !read_exact(inputs, &args)) return kFailed;
    choose_blocks();
    return 0;
  }

  int32_t enqueue(const PluginTensorDesc *input_descs, const PluginTensorDesc *, const void *const *inputs,
                  void *const *outputs, void *workspace, cudaStream_t stream) noexcept override {
    redraft_tree_attention_args args;
    if (!read_exact(input_descs, &args)) return kFailed;
    args.ctas = blocks_;
    args.q = inputs[kQ];
    args.k = inputs[kK];
    args.v = inputs[kV];
    args.mask_bools = static_cast<const uint8_t *>(inputs[kTreeMask]);
    args.positions = static_cast<const int64_t *>(inputs[kPositions]);
    args.cache_len = static_cast<const int64_t *>(inputs[kPastLen]);
    args.out = outputs[kOut - kInputs];
    args.key_cache = outputs[kPresentKey - kInputs];
    args.value_cache = outputs[kPresentValue - kInputs];
    if (!copy_cache(args, args.key_cache, inputs[kKeyCache], stream)) return kFailed;
    if (!copy_cache(args, args.value_cache, inputs[kValueCache], stream)) return kFailed;
    // TensorRT does not pass the size of the workspace. It is that of getWorkspaceSize, which choose_blocks respects.
    if (redraft_tree_attention(&args, workspace, SIZE_MAX, stream) == REDRAFT_OK) return 0;
    refuse("%s", redraft_last_error());
    return kFailed;
  }

  IPluginV3 *attachToContext(IPluginResourceContext *) noexcept override { return clone(); }

  const PluginFieldCollection *getFieldsToSerialize() noexcept override {
    fields_ = fields_of(attributes_);
    collection_ = PluginFieldCollection{kFields, fields_.data()};
    return &collection_;
  }

 private:
  static bool check_counts(int inputs, int outputs) {
    return (inputs == kInputs && outputs == kOutputs) ||
           refuse("tensors: expected %d inputs and %d outputs, found %d and %d", kInputs, kOutputs, inputs, outputs);
  }

  bool read_exact(const PluginTensorDesc *inputs, redraft_tree_attention_args *args) const {
    Dims dims[kInputs];
    for (int i = 0; i < kInputs; ++i) dims[i] = inputs[i].dims;
    return read_sizes(dims, inputs[kQ].type, attributes_, args);
  }

  bool read_largest(const DynamicPluginTensorDesc *inputs, redraft_tree_attention_args *args) const {
    Dims dims[kInputs];
    for (int i = 0; i < kInputs; ++i) dims[i] = inputs[i].max;
    return read_sizes(dims, inputs[kQ].desc.type, attributes_, args);
  }

  // The build device fixed the size of the scratch memory. TensorRT's hardware compatibility allows a device that runs
  // more blocks at once. It gets one block for each multiprocessor of the build device, which fits with any kernel.
  void choose_blocks() {
    int32_t multiprocessors = 0;
    int32_t compute_capability = 0;
    find_device(&multiprocessors, &compute_capability);
    const bool fits = attributes_.multiprocessors == 0 || (compute_capability == attributes_.compute_capability &&
                                                           multiprocessors <= attributes_.multiprocessors);
    blocks_ = fits ? 0 : attributes_.multiprocessors;
    if (!fits) {
      say(ILogger::Severity::kVERBOSE,
          "built for %d multiprocessors of compute capability %d, found %d of %d: running %d blocks",
          attributes_.multiprocessors, attributes_.compute_capability, multiprocessors, compute_capability, blocks_);
    }
  }

  bool copy_cache(const redraft_tree_attention_args &args, void *to, const void *from, cudaStream_t stream) const {
    if (to == from) return true;
    const size_t elements = static_cast<size_t>(args.batch) * args.kv_heads * args.capacity * args.head_dim;
    const size_t bytes = elements * (args.dtype == REDRAFT_FLOAT32 ? 4 : 2);
    if (phase_ == TensorRTPhase::kRUNTIME) warn_of_copies(bytes);
    const cudaError_t status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    return status == cudaSuccess || refuse("a cache was not copied: %s", cudaGetErrorString(status));
  }

  // Once a process. The builder, which times the plugin over buffers of its own, always copies and is not warned.
  static void warn_of_copies(size_t bytes) {
    static std::atomic_flag warned = ATOMIC_FLAG_INIT;
    if (warned.test_and_set()) return;
    say(ILogger::Severity::kWARNING,
        "present_key is not at the address of key_cache, or present_value not at that of value_cache: "
        "every call copies each cache whole (%zu bytes)",
        bytes);
  }

  const Attributes attributes_;
  const TensorRTPhase phase_;
  int32_t blocks_ = 0;  // of the attention kernel; 0: as many as the device runs at once
  char identity_[128];
  Fields fields_;
  PluginFieldCollection collection_{};
};

class Creator final : public IPluginCreatorV3One {
 public:
  Creator() : collection_{kOperatorFields, fields_.data()} {}

  const char *getPluginName() const noexcept override { return kName; }
  const char *getPluginVersion() const noexcept override { return kVersion; }
  const char *getPluginNamespace() const noexcept override { return kNamespace; }
  const PluginFieldCollection *getFieldNames() noexcept override { return &collection_; }

  IPluginV3 *createPlugin(const char *, const PluginFieldCollection *fields, TensorRTPhase phase) noexcept override {
    const bool building = phase == TensorRTPhase::kBUILD;
    Attributes attributes;
    if (!read_fields(fields, building ? kOperatorFields : kFields, &attributes)) return nullptr;
    if (building) find_device(&attributes.multiprocessors, &attributes.compute_capability);
    return new (std::nothrow) TreeAttention(attributes, phase);
  }

 private:
  const Attributes none_;
  const Fields fields_ = fields_of(none_);
  const PluginFieldCollection collection_;
};

}  // namespace

}  // namespace redraft

// Interfaces differ between major versions: the logger of 11 crashes a plugin of 10, and vice versa. So the library
// registers nothing with another major version than its own.
extern "C" {

REDRAFT_API void setLoggerFinder(nvinfer1::ILoggerFinder *finder) {
  if (redraft::caller_major(__builtin_return_address(0)) == NV_TENSORRT_MAJOR) redraft::use_logger_finder(finder);
}

REDRAFT_API nvinfer1::IPluginCreatorInterface *const *getCreators(int32_t &count) {
  static redraft::Creator creator;
  static nvinfer1::IPluginCreatorInterface *const creators[] = {&creator};
  const int major = redraft::caller_major(__builtin_return_address(0));
  count = major == NV_TENSORRT_MAJOR ? 1 : 0;
  if (count == 0) {
    redraft::refuse(
        "expected TensorRT %d, for which this library was built, found %d; build another library: "
        "make plugins TENSORRT_ROOT=dir",
        NV_TENSORRT_MAJOR, major);
  }
  return creators;
}

}  // extern "C"
