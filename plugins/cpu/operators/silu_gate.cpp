#include "silu_gate.h"

#include "../attention/gate.h"
#include "shares.h"
#include "values.h"

namespace redraft::operators {
namespace {

constexpr int64_t kGatedShare = 1 << 13;  // numbers that are worth waking a thread for

}  // namespace

void SiluGate::compute(OrtKernelContext *context) const {
  const Tensor x(api_, input(api_, context, kGatesAndValues));
  if (x.shape.empty() || x.shape.back() % 2 != 0) throw Refused("x: expected an even last dimension");
  std::vector<int64_t> shape = x.shape;
  shape.back() /= 2;
  redraft_gate_call call{};
  call.n = shape.back();
  call.x = static_cast<const float *>(x.data);
  if (const OrtValue *value = input(api_, context, kFactors)) {
    const Tensor factors(api_, value);
    if (factors.count() != call.n) throw Refused("factors: expected a number for each of y's last dimension");
    call.factors = static_cast<const float *>(factors.data);
  }
  OrtValue *result = nullptr;
  check(api_.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &result));
  void *y = nullptr;
  check(api_.GetTensorMutableData(result, &y));
  call.y = static_cast<float *>(y);
  const int64_t rows = call.n == 0 ? 0 : x.count() / (2 * call.n);
  in_shares(api_, context, rows, rows * call.n / kGatedShare,
            [&](int64_t first, int64_t last) { redraft_gate(&call, first, last); });
}

}  // namespace redraft::operators
