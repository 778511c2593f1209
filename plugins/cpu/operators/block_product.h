// The kernel of a product with weights of 4 or 8 bits, over the entries of products.h.
//
//   x            fp32 [..., k]
//   codes        uint8 [n, ceil(k / block), block * bits / 8]
//   scales       fp32 [n, ceil(k / block)]
//   zero_points  uint8 [n, ceil(ceil(k / block) * bits / 8)], optional
//   g_idx        refused
//   bias         fp32 [n], optional
//   y            fp32 [..., n]
//
// These are the inputs, and with the attributes K, N, bits and block_size the meaning, of com.microsoft's MatMulNBits.

#pragma once

#include <memory>

#include "onnxruntime_api.h"

namespace redraft::operators {

enum Input : size_t { kX, kCodes, kScales, kZeroPoints, kGroupIndex, kBias, kInputs };

class BlockProduct {
 public:
  // Packs the weights, which must be constants, and gives the memory of their stored form back if it is a file's.
  BlockProduct(const OrtApi &api, const OrtKernelInfo *info);

  // Computes one call. Calls may run at the same time.
  void compute(OrtKernelContext *context) const;

 private:
  struct Free {
    void operator()(void *memory) const;
  };

  const OrtApi &api_;
  int64_t n_ = 0, k_ = 0;
  std::unique_ptr<void, Free> packed_;
};

}  // namespace redraft::operators
