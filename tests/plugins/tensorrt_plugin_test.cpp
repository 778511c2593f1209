// The TensorRT plugin without TensorRT and without a GPU: its library is entered as TensorRT enters it, the kernels are
// those of the CPU build, and the few calls of the CUDA runtime end in the stand-ins below.
//
// Prints each expectation that is not met; the exit status counts them.

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../plugins/tensorrt/tensors.h"

using namespace nvinfer1;
using redraft::kInputs;
using redraft::kOutputs;
using redraft::kTensors;

extern "C" {
void setLoggerFinder(ILoggerFinder *finder);
IPluginCreatorInterface *const *getCreators(int32_t &count);
}

namespace {

int failures = 0;
std::string logged;
ILogger::Severity severity;
int copies = 0;
int multiprocessors = 100;
bool has_device = true;

void expect(bool holds, int line, const char *text) {
  if (holds) return;
  ++failures;
  printf("line %d: expected %s; last message: %s\n", line, text, logged.c_str());
}
#define EXPECT(...) expect((__VA_ARGS__), __LINE__, #__VA_ARGS__)

bool said(const std::string &text) { return logged.find(text) != std::string::npos; }

struct Logger final : ILogger {
  void log(Severity level, const char *message) noexcept override {
    severity = level;
    logged = message;
  }
} logger;

struct Finder final : ILoggerFinder {
  ILogger *findLogger() override { return &logger; }
} finder;

}  // namespace

// Stand-ins for the CUDA runtime.

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return has_device ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : 0;
  return cudaSuccess;
}

namespace {

IPluginCreatorV3One &creator() {
  int32_t count = 0;
  IPluginCreatorInterface *const *creators = getCreators(count);
  EXPECT(count == 1);
  return *static_cast<IPluginCreatorV3One *>(creators[0]);
}

// Fields as the ONNX parser makes them, which a test may bend.
struct Given {
  float scale = 0.125f;
  float softcap = 30.f;
  int32_t window = 6;
  int32_t q_heads = 4;
  int32_t kv_heads = 2;
  std::vector<PluginField> fields = {{"scale", &scale, PluginFieldType::kFLOAT32, 1},
                                     {"softcap", &softcap, PluginFieldType::kFLOAT32, 1},
                                     {"window", &window, PluginFieldType::kINT32, 1},
                                     {"q_heads", &q_heads, PluginFieldType::kINT32, 1},
                                     {"kv_heads", &kv_heads, PluginFieldType::kINT32, 1}};

  Given() = default;
  Given(const Given &) = delete;

  std::unique_ptr<IPluginV3> create(TensorRTPhase phase = TensorRTPhase::kBUILD) const {
    logged.clear();
    const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    return std::unique_ptr<IPluginV3>(creator().createPlugin("node", &collection, phase));
  }
};

template <class Capability>
Capability &as(IPluginV3 &plugin, PluginCapabilityType type) {
  return *static_cast<Capability *>(plugin.getCapabilityInterface(type));
}
IPluginV3OneBuild &build(IPluginV3 &plugin) { return as<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD); }
IPluginV3OneRuntime &runtime(IPluginV3 &plugin) {
  return as<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

std::string fields_text(IPluginV3 &plugin) {
  std::string text;
  const PluginFieldCollection *collection = runtime(plugin).getFieldsToSerialize();
  for (int i = 0; i < collection->nbFields; ++i) {
    const PluginField &field = collection->fields[i];
    const std::string value = field.type == PluginFieldType::kFLOAT32
                                  ? std::to_string(*static_cast<const float *>(field.data))
                                  : std::to_string(*static_cast<const int32_t *>(field.data));
    text += std::string(field.name) + "=" + value + " ";
  }
  return text;
}

void test_names() {
  EXPECT(std::string(creator().getPluginName()) == "TreeAttention");
  EXPECT(std::string(creator().getPluginVersion()) == "1");
  EXPECT(std::string(creator().getPluginNamespace()).empty());
  const char *const names[] = {"scale", "softcap", "window", "q_heads", "kv_heads"};
  const PluginFieldCollection *fields = creator().getFieldNames();
  EXPECT(fields->nbFields == 5);
  for (int i = 0; i < 5; ++i) EXPECT(std::string(fields->fields[i].name) == names[i]);
  const auto plugin = Given().create();
  auto &core = as<IPluginV3OneCore>(*plugin, PluginCapabilityType::kCORE);
  EXPECT(std::string(core.getPluginName()) == creator().getPluginName());
  EXPECT(std::string(core.getPluginVersion()) == creator().getPluginVersion());
  EXPECT(std::string(core.getPluginNamespace()) == creator().getPluginNamespace());
}

void test_fields_are_refused(const std::string &message, const std::function<void(Given &)> &bend) {
  Given given;
  bend(given);
  const bool refused = !given.create();
  EXPECT(refused);
  EXPECT(said(message));
  if (!refused || !said(message)) printf("  message wanted: %s\n", message.c_str());
}

void test_fields() {
  const auto refused = test_fields_are_refused;
  refused("missing", [](Given &it) { it.fields.pop_back(); });
  refused("kv_heads", [](Given &it) { it.fields.pop_back(); });
  refused("found heads", [](Given &it) { it.fields[3].name = "heads"; });
  refused("scale: expected a float32", [](Given &it) { it.fields[0].type = PluginFieldType::kFLOAT64; });
  refused("window: expected an int32", [](Given &it) { it.fields[2].type = PluginFieldType::kFLOAT32; });
  refused("window: expected one value, found 2", [](Given &it) { it.fields[2].length = 2; });
  refused("window: expected 0 or more, found -1", [](Given &it) { it.window = -1; });
  refused("softcap: expected 0 or more", [](Given &it) { it.softcap = -1.f; });
  refused("scale: expected a finite number", [](Given &it) { it.scale = 1.f / 0.f; });
  refused("q_heads: expected a multiple of kv_heads = 3, found 4", [](Given &it) { it.kv_heads = 3; });
  refused("kv_heads: expected 1 or more", [](Given &it) { it.kv_heads = 0; });
  static const int64_t wide = int64_t{1} << 32;
  refused("window: expected a value of 32 bits",
          [](Given &it) { it.fields[2] = {"window", &wide, PluginFieldType::kINT64, 1}; });

  Given given;
  const int64_t window = 6;
  const auto narrow = given.create();
  given.fields[2] = {"window", &window, PluginFieldType::kINT64, 1};
  const auto taken = given.create();
  EXPECT(taken && fields_text(*taken) == fields_text(*narrow));
}

void test_plan_fields_return() {
  const auto plugin = Given().create();
  const std::string text = fields_text(*plugin);
  EXPECT(text ==
         "scale=0.125000 softcap=30.000000 window=6 q_heads=4 kv_heads=2 multiprocessors=100 compute_capability=90 ");
  Given plan;
  const PluginFieldCollection *kept = runtime(*plugin).getFieldsToSerialize();
  plan.fields.assign(kept->fields, kept->fields + kept->nbFields);
  multiprocessors = 50;
  const auto again = plan.create(TensorRTPhase::kRUNTIME);
  multiprocessors = 100;
  EXPECT(again && fields_text(*again) == text);
  plan.fields.pop_back();
  EXPECT(!plan.create(TensorRTPhase::kRUNTIME));
  EXPECT(said("compute_capability"));
  for (IPluginV3 *copy : {plugin->clone(), runtime(*plugin).attachToContext(nullptr)}) {
    EXPECT(copy != plugin.get() && fields_text(*copy) == text);
    delete copy;
  }
  has_device = false;
  EXPECT(fields_text(*Given().create()).find("multiprocessors=0 compute_capability=0") != std::string::npos);
  has_device = true;
}

constexpr int kBatch = 2;
constexpr int kNodes = 5;
constexpr int kCapacity = 200;  // several tiles of keys
constexpr int kHeadDim = 64;
constexpr DataType kFloats[] = {DataType::kHALF, DataType::kBF16, DataType::kFLOAT};

using Tensors = std::vector<PluginTensorDesc>;

Tensors tensors_of(DataType type, int64_t q_heads = 4, int64_t kv_heads = 2) {
  const Dims q{3, {kBatch, kNodes, q_heads * kHeadDim}};
  const Dims k{3, {kBatch, kNodes, kv_heads * kHeadDim}};
  const Dims cache{4, {kBatch, kv_heads, kCapacity, kHeadDim}};
  const Dims mask{3, {kBatch, kNodes, kNodes}};
  const Dims positions{2, {kBatch, kNodes}};
  const Dims lengths{1, {kBatch}};
  const Dims kv_len{1, {1}};
  const Dims dims[kTensors] = {q, k, k, cache, cache, mask, positions, lengths, kv_len, q, cache, cache};
  Tensors tensors;
  for (int i = 0; i < kTensors; ++i) {
    const DataType its = i == redraft::kTreeMask                            ? DataType::kBOOL
                         : i >= redraft::kPositions && i <= redraft::kKvLen ? DataType::kINT64
                                                                            : type;
    tensors.push_back({dims[i], its, TensorFormat::kLINEAR, 1.f});
  }
  return tensors;
}

// As a profile whose largest sizes are those of `tensors`.
std::vector<DynamicPluginTensorDesc> profile_of(const Tensors &tensors) {
  std::vector<DynamicPluginTensorDesc> profile;
  for (const PluginTensorDesc &tensor : tensors) {
    DynamicPluginTensorDesc each{tensor, tensor.dims, tensor.dims, tensor.dims};
    each.desc.dims.d[0] = -1;
    each.min.d[0] = 1;
    profile.push_back(each);
  }
  return profile;
}

void test_formats() {
  const auto plugin = Given().create();
  for (const DataType type : kFloats) {
    const auto good = profile_of(tensors_of(type));
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      for (int other = 0; other <= static_cast<int>(DataType::kINT4); ++other) {
        for (const TensorFormat format : {TensorFormat::kLINEAR, TensorFormat::kCHW2, TensorFormat::kHWC8}) {
          auto tensors = good;
          tensors[tensor].desc.type = static_cast<DataType>(other);
          tensors[tensor].desc.format = format;
          const bool any_float = other == static_cast<int>(DataType::kHALF) ||
                                 other == static_cast<int>(DataType::kBF16) ||
                                 other == static_cast<int>(DataType::kFLOAT);
          const bool type_fits =
              tensor == redraft::kQ ? any_float : tensors[tensor].desc.type == good[tensor].desc.type;
          EXPECT(build(*plugin).supportsFormatCombination(tensor, tensors.data(), kInputs, kOutputs) ==
                 (type_fits && format == TensorFormat::kLINEAR));
        }
      }
    }
    EXPECT(!build(*plugin).supportsFormatCombination(0, good.data(), kInputs - 1, kOutputs));
  }
}

void test_outputs() {
  const auto plugin = Given().create();
  EXPECT(build(*plugin).getNbOutputs() == kOutputs);
  const DataType inputs[kInputs] = {DataType::kBF16};
  DataType types[kOutputs] = {};
  EXPECT(build(*plugin).getOutputDataTypes(types, kOutputs, inputs, kInputs) == 0);
  for (const DataType type : types) EXPECT(type == DataType::kBF16);

  // Only the addresses of expressions are passed on, and the builder of new ones is not asked.
  DimsExprs shapes[kInputs] = {};
  static const char expressions[kInputs] = {};
  for (int i = 0; i < kInputs; ++i) {
    shapes[i].nbDims = i + 1;
    shapes[i].d[0] = reinterpret_cast<const IDimensionExpr *>(expressions + i);
  }
  alignas(16) char no_builder[64] = {};
  DimsExprs found[kOutputs] = {};
  EXPECT(build(*plugin).getOutputShapes(shapes, kInputs, nullptr, 0, found, kOutputs,
                                        reinterpret_cast<IExprBuilder &>(no_builder)) == 0);
  const int sources[kOutputs] = {redraft::kQ, redraft::kKeyCache, redraft::kValueCache};
  for (int i = 0; i < kOutputs; ++i) {
    EXPECT(found[i].nbDims == sources[i] + 1 && found[i].d[0] == shapes[sources[i]].d[0]);
  }
}

void test_sizes_are_refused(const std::string &message, const std::function<void(Tensors &)> &bend) {
  const auto plugin = Given().create();
  Tensors tensors = tensors_of(DataType::kHALF);
  bend(tensors);
  const auto profile = profile_of(tensors);
  const bool refused = build(*plugin).configurePlugin(profile.data(), kInputs, profile.data() + kInputs, kOutputs) != 0;
  const bool named = said(message);
  EXPECT(refused && named);
  if (!refused || !named) printf("  message wanted: %s\n", message.c_str());
  EXPECT(runtime(*plugin).onShapeChange(tensors.data(), kInputs, tensors.data() + kInputs, kOutputs) != 0);
}

void test_sizes() {
  const auto plugin = Given().create();
  const auto good = profile_of(tensors_of(DataType::kHALF));
  EXPECT(build(*plugin).configurePlugin(good.data(), kInputs, good.data() + kInputs, kOutputs) == 0);
  EXPECT(build(*plugin).configurePlugin(good.data(), kInputs - 1, good.data() + kInputs, kOutputs) != 0);
  EXPECT(said("expected 9 inputs and 3 outputs, found 8 and 3"));

  const char *const names[kInputs] = {"q",         "k",         "v",         "key_cache", "value_cache",
                                      "tree_mask", "positions", "cache_len", "kv_len"};
  for (int input = 0; input < kInputs; ++input) {
    const std::string name = std::string(names[input]) + ": expected ";
    const int rank = tensors_of(DataType::kHALF)[input].dims.nbDims;
    test_sizes_are_refused(name + std::to_string(rank) + " dimensions, found [",
                           [&](Tensors &tensors) { tensors[input].dims.nbDims += 1; });
    if (input == redraft::kKeyCache) continue;  // it gives the head size that others are held against
    test_sizes_are_refused(name, [&](Tensors &tensors) { tensors[input].dims.d[rank - 1] += 1; });
  }
  test_sizes_are_refused("q: expected [2, 5, 260] with q_heads = 4, kv_heads = 2 and head size 65, found [2, 5, 256]",
                         [](Tensors &tensors) { tensors[redraft::kKeyCache].dims.d[3] = 65; });
  test_sizes_are_refused("value_cache: expected [2, 2, 200, 64]",
                         [](Tensors &tensors) { tensors[redraft::kValueCache].dims.d[2] = 32; });
  test_sizes_are_refused("head_dim: expected 64, 80, 96, 128 or 256, found 72", [](Tensors &tensors) {
    tensors[redraft::kQ].dims.d[2] = 4 * 72;
    tensors[redraft::kK].dims.d[2] = tensors[redraft::kV].dims.d[2] = 2 * 72;
    tensors[redraft::kKeyCache].dims.d[3] = tensors[redraft::kValueCache].dims.d[3] = 72;
  });
  test_sizes_are_refused("nodes: expected at most capacity = 4, found 5", [](Tensors &tensors) {
    tensors[redraft::kKeyCache].dims.d[2] = tensors[redraft::kValueCache].dims.d[2] = 4;
  });
  test_sizes_are_refused("nodes: expected at most 4096 under a mask, found 5000", [](Tensors &tensors) {
    for (const int input : {redraft::kQ, redraft::kK, redraft::kV, redraft::kTreeMask, redraft::kPositions}) {
      tensors[input].dims.d[1] = 5000;
    }
    tensors[redraft::kTreeMask].dims.d[2] = 5000;
    tensors[redraft::kKeyCache].dims.d[2] = tensors[redraft::kValueCache].dims.d[2] = 8000;
  });
}

void test_workspace() {
  const auto plugin = Given().create();
  const auto profile = profile_of(tensors_of(DataType::kHALF));
  const size_t given = build(*plugin).getWorkspaceSize(profile.data(), kInputs, profile.data() + kInputs, kOutputs);
  redraft_tree_attention_args args{};
  args.batch = kBatch;
  args.q_heads = 4;
  args.kv_heads = 2;
  args.head_dim = kHeadDim;
  args.capacity = kCapacity;
  size_t most = 0;
  for (args.nodes = 1; args.nodes <= kNodes; ++args.nodes) {
    size_t needed = 0;
    EXPECT(redraft_tree_attention_workspace(&args, &needed) == 0);
    most = needed > most ? needed : most;
  }
  EXPECT(given == most && most > 0);
}

// A call's tensors, in an array of bytes each.
struct Call {
  Tensors descs;
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<unsigned char> workspace;

  explicit Call(DataType type) : descs(tensors_of(type)) {
    std::mt19937 random(7);
    for (const PluginTensorDesc &desc : descs) {
      size_t count = desc.type == DataType::kBOOL    ? 1
                     : desc.type == DataType::kINT64 ? 8
                     : type == DataType::kFLOAT      ? 4
                                                     : 2;
      const size_t each = count;
      for (int i = 0; i < desc.dims.nbDims; ++i) count *= desc.dims.d[i];
      bytes.emplace_back(count);
      if (desc.type == type) fill(bytes.back(), each, type, random);
    }
    const int64_t past[kBatch] = {190, 130};
    memcpy(bytes[redraft::kPastLen].data(), past, sizeof past);
    const int depths[kNodes] = {0, 1, 1, 2, 2};
    const int parents[kNodes] = {-1, 0, 0, 1, 2};
    for (int b = 0; b < kBatch; ++b) {
      for (int i = 0; i < kNodes; ++i) {
        const int64_t position = past[b] + depths[i];
        memcpy(bytes[redraft::kPositions].data() + (b * kNodes + i) * 8, &position, 8);
        for (int j = i; j >= 0; j = parents[j]) bytes[redraft::kTreeMask][(b * kNodes + i) * kNodes + j] = 1;
      }
    }
  }

  // Numbers of a size below one.
  static void fill(std::vector<unsigned char> &to, size_t each, DataType type, std::mt19937 &random) {
    for (size_t i = 0; i < to.size(); i += each) {
      const float value = static_cast<float>(random() % 2001) / 1000.f - 1.f;
      uint32_t bits;
      memcpy(&bits, &value, 4);
      const uint16_t bfloat16 = static_cast<uint16_t>(bits >> 16);
      const uint16_t half = static_cast<uint16_t>((random() & 0x83ff) | (10 + random() % 5) << 10);
      memcpy(to.data() + i,
             type == DataType::kFLOAT  ? static_cast<const void *>(&bits)
             : type == DataType::kBF16 ? static_cast<const void *>(&bfloat16)
                                       : static_cast<const void *>(&half),
             each);
    }
  }

  void *at(int tensor) { return bytes[tensor].data(); }

  // As TensorRT runs a node; `in_place` binds the present caches to the past ones.
  int enqueue(IPluginV3 &plugin, bool in_place) {
    const auto profile = profile_of(descs);
    workspace.assign(build(plugin).getWorkspaceSize(profile.data(), kInputs, profile.data() + kInputs, kOutputs), 0xff);
    const std::unique_ptr<IPluginV3> attached(runtime(plugin).attachToContext(nullptr));
    const PluginTensorDesc *outs = descs.data() + kInputs;
    if (runtime(*attached).onShapeChange(descs.data(), kInputs, outs, kOutputs) != 0) return -1;
    const void *inputs[kInputs];
    for (int i = 0; i < kInputs; ++i) inputs[i] = at(i);
    void *outputs[kOutputs] = {at(redraft::kOut), at(in_place ? redraft::kKeyCache : redraft::kPresentKey),
                               at(in_place ? redraft::kValueCache : redraft::kPresentValue)};
    return runtime(*attached).enqueue(descs.data(), outs, inputs, outputs, workspace.data(), nullptr);
  }

  // The same by the C entry, in place.
  int run_entry(const Given &given, int dtype, int blocks = 0) {
    redraft_tree_attention_args args{};
    args.dtype = dtype;
    args.batch = kBatch;
    args.nodes = kNodes;
    args.q_heads = given.q_heads;
    args.kv_heads = given.kv_heads;
    args.head_dim = kHeadDim;
    args.capacity = kCapacity;
    args.window = given.window;
    args.scale = given.scale;
    args.softcap = given.softcap;
    args.ctas = blocks;
    args.q = at(redraft::kQ);
    args.k = at(redraft::kK);
    args.v = at(redraft::kV);
    args.key_cache = at(redraft::kKeyCache);
    args.value_cache = at(redraft::kValueCache);
    args.mask_bools = static_cast<const uint8_t *>(at(redraft::kTreeMask));
    args.positions = static_cast<const int64_t *>(at(redraft::kPositions));
    args.cache_len = static_cast<const int64_t *>(at(redraft::kPastLen));
    args.out = at(redraft::kOut);
    size_t needed = 0;
    if (const int status = redraft_tree_attention_workspace(&args, &needed)) return status;
    workspace.assign(needed, 0xff);
    return redraft_tree_attention(&args, workspace.data(), needed, nullptr);
  }
};

void test_enqueue(DataType type, int dtype) {
  Given given;
  const auto plugin = given.create();
  Call expected(type);
  const Call before(type);
  EXPECT(expected.run_entry(given, dtype) == 0);
  EXPECT(expected.bytes[redraft::kKeyCache] != before.bytes[redraft::kKeyCache]);

  Call same(type);
  copies = 0;
  EXPECT(same.enqueue(*plugin, true) == 0 && copies == 0);
  for (const int tensor : {redraft::kOut, redraft::kKeyCache, redraft::kValueCache}) {
    EXPECT(same.bytes[tensor] == expected.bytes[tensor]);
  }

  Call apart(type);
  EXPECT(apart.enqueue(*plugin, false) == 0 && copies == 2);
  EXPECT(!said("copies each cache"));  // the builder times a plugin over buffers of its own
  EXPECT(apart.bytes[redraft::kOut] == expected.bytes[redraft::kOut]);
  EXPECT(apart.bytes[redraft::kPresentKey] == expected.bytes[redraft::kKeyCache]);
  EXPECT(apart.bytes[redraft::kPresentValue] == expected.bytes[redraft::kValueCache]);
  EXPECT(apart.bytes[redraft::kKeyCache] == before.bytes[redraft::kKeyCache]);
  EXPECT(apart.bytes[redraft::kValueCache] == before.bytes[redraft::kValueCache]);
}

// More blocks than the scratch memory was measured for must not run. How many ran shows in the last bits of the sums.
void test_enqueue_on_another_device() {
  multiprocessors = 3;
  Given given;
  given.window = 0;
  const auto plugin = given.create();
  Call free(DataType::kFLOAT);
  Call bound(DataType::kFLOAT);
  EXPECT(free.run_entry(given, REDRAFT_FLOAT32) == 0 && bound.run_entry(given, REDRAFT_FLOAT32, 3) == 0);
  EXPECT(free.bytes[redraft::kOut] != bound.bytes[redraft::kOut]);
  for (const int found : {2, 3, 4}) {
    multiprocessors = found;
    logged.clear();
    Call call(DataType::kFLOAT);
    EXPECT(call.enqueue(*plugin, true) == 0);
    EXPECT(said("running 3 blocks") == (found > 3));
    EXPECT(call.bytes[redraft::kOut] == (found > 3 ? bound : free).bytes[redraft::kOut]);
  }
  multiprocessors = 100;
}

void test_engines_warn_of_copies_once() {
  const auto built = Given().create();
  const PluginFieldCollection *kept = runtime(*built).getFieldsToSerialize();
  Given plan;
  plan.fields.assign(kept->fields, kept->fields + kept->nbFields);
  const auto plugin = plan.create(TensorRTPhase::kRUNTIME);
  Call same(DataType::kFLOAT);
  EXPECT(same.enqueue(*plugin, true) == 0 && !said("copies each cache"));
  for (const bool first : {true, false}) {
    logged.clear();
    Call apart(DataType::kFLOAT);
    EXPECT(apart.enqueue(*plugin, false) == 0 && said("every call copies each cache whole") == first);
    EXPECT(!first || severity == ILogger::Severity::kWARNING);
  }
}

}  // namespace

int main() {
  setLoggerFinder(&finder);
  test_names();
  test_fields();
  test_plan_fields_return();
  test_formats();
  test_outputs();
  test_sizes();
  test_workspace();
  test_enqueue(DataType::kHALF, REDRAFT_FLOAT16);
  test_enqueue(DataType::kBF16, REDRAFT_BFLOAT16);
  test_enqueue(DataType::kFLOAT, REDRAFT_FLOAT32);
  test_enqueue_on_another_device();
  test_engines_warn_of_copies_once();
  printf("%d expectations failed\n", failures);
  return failures ? 1 : 0;
}
