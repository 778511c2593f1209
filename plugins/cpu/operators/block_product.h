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
//
// redraft::SummedProduct has the same attributes and tensors, but appends to each row of x the sums of its blocks of
// inputs, which are k numbers together: weights of the sums are offsets of the blocks. A sum has one order. Number i is
// added to sum i % 16, in ascending order, and then the second half of the sums to the first, until one is left.

#pragma once

#include <memory>

#include "onnxruntime_api.h"

namespace redraft::operators {

enum Input : size_t { kX, kCodes, kScales, kZeroPoints, kGroupIndex, kBias, kInputs };

class BlockProduct {
 public:
  // Packs the weights, which must be constants, and gives the memory of their stored form back if it is a file's.
  BlockProduct(const OrtApi &api, const OrtKernelInfo *info, bool appends_sums = false);

  // Computes one call. Calls may run at the same time.
  void compute(OrtKernelContext *context) const;

 private:
  struct Free {
    void operator()(void *memory) const;
  };

  const OrtApi &api_;
  int64_t n_ = 0, k_ = 0;
  int64_t inputs_ = 0;  // numbers of a row of x
  int64_t block_ = 0;   // numbers of x that share a sum
  std::unique_ptr<void, Free> packed_;
};

class SummedProduct : public BlockProduct {
 public:
  SummedProduct(const OrtApi &api, const OrtKernelInfo *info) : BlockProduct(api, info, true) {}
};

}  // namespace redraft::operators
