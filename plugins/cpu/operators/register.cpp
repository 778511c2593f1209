// The entry that ONNX Runtime calls (`SessionOptions.register_custom_ops_library`).
//
// The product has the name of an operator that ONNX Runtime has: a session looks for kernels among registered operators
// first. So it computes stored graphs as they are, and all that ONNX Runtime does to a graph stays the same.

#include <limits.h>

#include <initializer_list>
#include <string>

#include "block_product.h"
#include "onnxruntime_api.h"
#include "silu_gate.h"
#include "tree_attention.h"
#include "values.h"

namespace redraft::operators {
namespace {

// Runs work and turns what it throws into a status.
template <typename Work>
OrtStatus *guarded(const OrtApi &api, const Work &work) {
  try {
    work();
    return nullptr;
  } catch (const Failed &failed) {
    return failed.status;
  } catch (const Refused &refused) {
    return api.CreateStatus(kInvalidArgument, (std::string("redraft: ") + refused.what()).c_str());
  } catch (const std::exception &error) {
    return api.CreateStatus(kFail, (std::string("redraft: ") + error.what()).c_str());
  }
}

template <typename Kernel>
struct Made {
  const OrtApi &api;
  Kernel kernel;
};

// An operator whose kernel is a `Kernel`, with the parts that all of them share.
template <typename Kernel>
OrtCustomOp operator_of() {
  OrtCustomOp op{};
  op.version = kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp *) -> const char * { return nullptr; };
  op.GetOutputType = [](const OrtCustomOp *, size_t) { return kFloat; };
  op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp *, size_t) { return 0; };
  op.CreateKernelV2 = [](const OrtCustomOp *, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
    return guarded(*api, [=] { *kernel = new Made<Kernel>{*api, Kernel(*api, info)}; });
  };
  op.KernelComputeV2 = [](void *kernel, OrtKernelContext *context) {
    const auto &found = *static_cast<Made<Kernel> *>(kernel);
    return guarded(found.api, [&] { found.kernel.compute(context); });
  };
  op.KernelDestroy = [](void *kernel) { delete static_cast<Made<Kernel> *>(kernel); };
  op.GetStartVersion = [](const OrtCustomOp *) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp *) { return INT_MAX; };
  return op;
}

template <typename Product>
OrtCustomOp product(const char *(*name)(const OrtCustomOp *)) {
  OrtCustomOp op = operator_of<Product>();
  op.GetName = name;
  op.GetInputType = [](const OrtCustomOp *, size_t index) {
    if (index == kCodes || index == kZeroPoints) return kUint8;
    return index == kGroupIndex ? kInt32 : kFloat;
  };
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return kInputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp *, size_t i) { return i < kZeroPoints ? kRequired : kOptional; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
  return op;
}

// kCache: the type of the caches. ONNX Runtime joins operators of one name, and picks one by the types of a node's inputs.
template <OrtElementType kCache>
OrtCustomOp tree_attention() {
  OrtCustomOp op = operator_of<TreeAttention>();
  op.GetName = [](const OrtCustomOp *) { return "CpuTreeAttention"; };
  op.GetInputType = [](const OrtCustomOp *, size_t index) {
    if (index == kTreeMask) return kBool;
    if (index == kKeyCache || index == kValueCache) return kCache;
    return (index >= kPositions && index <= kKvLen) || index == kPackedRows ? kInt64 : kFloat;
  };
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return kAttentionInputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp *, size_t i) {
    return i == kK || i == kV || i >= kSinks ? kOptional : kRequired;
  };
  op.GetOutputType = [](const OrtCustomOp *, size_t index) { return index == kOut ? kFloat : kCache; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return kAttentionOutputs; };
  return op;
}

OrtCustomOp silu_gate() {
  OrtCustomOp op = operator_of<SiluGate>();
  op.GetName = [](const OrtCustomOp *) { return "SiluGate"; };
  op.GetInputType = [](const OrtCustomOp *, size_t) { return kFloat; };
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return kGateInputs; };
  op.GetInputCharacteristic = [](const OrtCustomOp *, size_t i) { return i == kFactors ? kOptional : kRequired; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
  return op;
}

OrtCustomOpDomain *made(const OrtApi &api, const char *name, std::initializer_list<const OrtCustomOp *> ops) {
  OrtCustomOpDomain *fresh = nullptr;
  check(api.CreateCustomOpDomain(name, &fresh));
  for (const OrtCustomOp *op : ops) check(api.CustomOpDomain_Add(fresh, op));
  return fresh;
}

// Adds the domains with the operators. Sessions point to them, so they are made once and never released.
void add_domains(const OrtApi &api, OrtSessionOptions *options) {
  static const OrtCustomOp replacing = product<BlockProduct>([](const OrtCustomOp *) { return "MatMulNBits"; });
  static const OrtCustomOp summed = product<SummedProduct>([](const OrtCustomOp *) { return "SummedProduct"; });
  static const OrtCustomOp gate = silu_gate();
  static const OrtCustomOp attention = tree_attention<kFloat>(), half = tree_attention<kFloat16>();
  static OrtCustomOpDomain *const replaced = made(api, "com.microsoft", {&replacing});
  static OrtCustomOpDomain *const own = made(api, "redraft", {&attention, &half, &gate, &summed});
  check(api.AddCustomOpDomain(options, replaced));
  check(api.AddCustomOpDomain(options, own));
}

}  // namespace
}  // namespace redraft::operators

extern "C" __attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *options,
                                                                               const OrtApiBase *base) {
  using namespace redraft::operators;
  const OrtApi *api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    const std::string message = std::string("redraft's operators need ONNX Runtime ") + kFirstRelease +
                                " or newer, found " + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(kFail, message.c_str());  // every version has this entry at this place
  }
  return guarded(*api, [=] { add_domains(*api, options); });
}
