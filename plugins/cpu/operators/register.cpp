// The entry that ONNX Runtime calls (`SessionOptions.register_custom_ops_library`).
//
// The operator has the name of one that ONNX Runtime has: a session looks for kernels among registered operators first.
// So it computes stored graphs as they are, and all that ONNX Runtime does to a graph stays the same.

#include <limits.h>

#include <mutex>
#include <string>

#include "block_product.h"
#include "onnxruntime_api.h"
#include "values.h"

namespace redraft::operators {
namespace {

constexpr char kDomain[] = "com.microsoft";

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

struct Kernel {
  Kernel(const OrtApi &api, const OrtKernelInfo *info) : api(api), product(api, info) {}
  const OrtApi &api;
  BlockProduct product;
};

OrtStatus *create(const OrtCustomOp *, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
  return guarded(*api, [=] { *kernel = new Kernel(*api, info); });
}

OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Kernel &found = *static_cast<const Kernel *>(kernel);
  return guarded(found.api, [&] { found.product.compute(context); });
}

void destroy(void *kernel) { delete static_cast<Kernel *>(kernel); }

OrtElementType input_type(const OrtCustomOp *, size_t index) {
  if (index == kCodes || index == kZeroPoints) return kUint8;
  return index == kGroupIndex ? kInt32 : kFloat;
}

OrtCustomOp block_product() {
  OrtCustomOp op{};
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp *) { return "MatMulNBits"; };
  op.GetExecutionProviderType = [](const OrtCustomOp *) -> const char * { return nullptr; };
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const OrtCustomOp *) -> size_t { return kInputs; };
  op.GetOutputType = [](const OrtCustomOp *, size_t) { return kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
  op.KernelDestroy = destroy;
  op.GetInputCharacteristic = [](const OrtCustomOp *, size_t i) { return i < kZeroPoints ? kRequired : kOptional; };
  op.GetOutputCharacteristic = [](const OrtCustomOp *, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp *, size_t) { return 0; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.GetStartVersion = [](const OrtCustomOp *) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp *) { return INT_MAX; };
  return op;
}

// Returns the domain with the operators. Sessions point to it, so it is made once and never released.
OrtCustomOpDomain *domain(const OrtApi &api) {
  static const OrtCustomOp op = block_product();
  static std::mutex lock;
  static OrtCustomOpDomain *made = nullptr;
  const std::lock_guard<std::mutex> guard(lock);
  if (made == nullptr) {
    OrtCustomOpDomain *fresh = nullptr;
    check(api.CreateCustomOpDomain(kDomain, &fresh));
    check(api.CustomOpDomain_Add(fresh, &op));
    made = fresh;
  }
  return made;
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
  return guarded(*api, [=] { check(api->AddCustomOpDomain(options, domain(*api))); });
}
