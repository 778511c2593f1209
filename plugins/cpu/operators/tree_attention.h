// The kernel of redraft::CpuTreeAttention, over ../attention. Its first inputs are those of the portable operator
// (`redraft.export.graph.tree_attention`). Lowered graphs add inputs:
//
//   q               fp32 [B, T, Hq * D]; without k and v: all three in one, [B, T, (Hq + 2 Hkv) * D]
//   key_cache, value_cache and their outputs: both fp32 or both fp16
//   packed_rows     int64 [N], optional: rows are packed, q [1, N, ...], positions [1, N]; the place of each row
//   cosines, sines  fp32 [positions, D / 2], optional: q and k are rotated first
//
// Attributes: those of the portable operator, and interleaved. kv_len is not read. present_key and present_value are the
// caches themselves if both are bound to the same memory, otherwise whole copies.

#pragma once

#include "onnxruntime_api.h"

namespace redraft::operators {

enum AttentionInput : size_t {
  kQ,
  kK,
  kV,
  kKeyCache,
  kValueCache,
  kTreeMask,
  kPositions,
  kCacheLen,
  kKvLen,
  kSinks,
  kPackedRows,
  kCosines,
  kSines,
  kAttentionInputs
};
enum AttentionOutput : size_t { kOut, kPresentKey, kPresentValue, kAttentionOutputs };

class TreeAttention {
 public:
  TreeAttention(const OrtApi &api, const OrtKernelInfo *info);

  // Computes one call. Calls may run at the same time, over other caches.
  void compute(OrtKernelContext *context) const;

 private:
  void *present(OrtKernelContext *context, AttentionInput cache, AttentionOutput output) const;

  const OrtApi &api_;
  int64_t q_heads_, kv_heads_, window_, chunk_, interleaved_;
  float scale_, softcap_;
};

}  // namespace redraft::operators
