// The kernel of redraft::SiluGate, over the entry of gate.h.
//
//   x        fp32 [..., 2 * n], gates first
//   factors  fp32 [n], optional
//   y        fp32 [..., n]

#pragma once

#include "onnxruntime_api.h"

namespace redraft::operators {

enum GateInput : size_t { kGatesAndValues, kFactors, kGateInputs };

class SiluGate {
 public:
  SiluGate(const OrtApi &api, const OrtKernelInfo *) : api_(api) {}

  // Computes one call. Calls may run at the same time.
  void compute(OrtKernelContext *context) const;

 private:
  const OrtApi &api_;
};

}  // namespace redraft::operators
