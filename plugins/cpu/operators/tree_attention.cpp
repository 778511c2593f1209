#include "tree_attention.h"

#include <string.h>

#include <string>

#include "../attention/plan.h"
#include "shares.h"
#include "values.h"

namespace redraft::operators {
namespace {

const char *const kNames[] = {"q",         "k",      "v",     "key_cache",   "value_cache", "tree_mask", "positions",
                              "cache_len", "kv_len", "sinks", "packed_rows", "cosines",     "sines"};

constexpr int64_t kWrittenShare = 1 << 14;  // numbers to rotate and write that are worth waking a thread for

void expect(bool fits, AttentionInput input, const char *shape) {
  if (!fits) throw Refused(std::string(kNames[input]) + ": expected " + shape);
}

}  // namespace

TreeAttention::TreeAttention(const OrtApi &api, const OrtKernelInfo *info)
    : api_(api), q_heads_(attribute(api, info, "q_heads")), kv_heads_(attribute(api, info, "kv_heads")),
      window_(attribute(api, info, "window")), chunk_(attribute(api, info, "chunk")),
      interleaved_(attribute(api, info, "interleaved")), scale_(float_attribute(api, info, "scale")),
      softcap_(float_attribute(api, info, "softcap")) {
  if (q_heads_ <= 0 || kv_heads_ <= 0) throw Refused("q_heads and kv_heads: expected positive numbers");
}

// Returns the memory of an output that continues a cache.
void *TreeAttention::present(OrtKernelContext *context, AttentionInput cache, AttentionOutput output) const {
  const Tensor given(api_, input(api_, context, cache));
  OrtValue *result = nullptr;
  check(api_.KernelContext_GetOutput(context, output, given.shape.data(), given.shape.size(), &result));
  void *memory = nullptr;
  check(api_.GetTensorMutableData(result, &memory));
  const size_t bytes = given.type == kFloat16 ? 2 : 4;
  if (memory != given.data) memcpy(memory, given.data, static_cast<size_t>(given.count()) * bytes);
  return memory;
}

void TreeAttention::compute(OrtKernelContext *context) const {
  const auto optional = [&](AttentionInput number) { return input(api_, context, number); };
  const auto tensor = [&](AttentionInput number) {
    const OrtValue *value = input(api_, context, number);
    expect(value != nullptr, number, "a tensor");
    return Tensor(api_, value);
  };
  const Tensor q = tensor(kQ), keys = tensor(kKeyCache), mask = tensor(kTreeMask);
  const Tensor positions = tensor(kPositions), cache_len = tensor(kCacheLen);
  redraft_attention_call call{};
  expect(keys.shape.size() == 4 && keys.shape[1] == kv_heads_, kKeyCache, "[B, kv_heads, C, D]");
  expect(tensor(kValueCache).shape == keys.shape, kValueCache, "the shape of key_cache");
  const int64_t sequences = keys.shape[0], size = keys.shape[3];
  expect(mask.shape.size() == 3 && mask.shape[0] == sequences && mask.shape[1] == mask.shape[2], kTreeMask,
         "[B, T, T]");
  expect(cache_len.count() == sequences, kCacheLen, "[B]");
  expect(q.shape.size() == 3, kQ, "[B, T, numbers], or [1, N, numbers] with packed rows");
  call.rows = q.shape[0] * q.shape[1];
  expect(positions.count() == call.rows, kPositions, "a position for each row of q");
  call.sequences = sequences;
  call.nodes = mask.shape[1];
  call.capacity = keys.shape[2];
  call.half = keys.type == kFloat16;
  call.q_heads = q_heads_;
  call.kv_heads = kv_heads_;
  call.head_dim = size;
  call.window = window_;
  call.chunk = chunk_;
  call.scale = scale_;
  call.softcap = softcap_;
  call.interleaved = interleaved_;
  const int64_t q_numbers = q_heads_ * size, kv_numbers = kv_heads_ * size;
  call.q = static_cast<const float *>(q.data);
  if (optional(kK) != nullptr || optional(kV) != nullptr) {
    const Tensor k = tensor(kK), v = tensor(kV);
    expect(q.shape[2] == q_numbers, kQ, "q_heads * D numbers a row");
    expect(k.count() == call.rows * kv_numbers, kK, "kv_heads * D numbers for each row of q");
    expect(v.count() == k.count(), kV, "the shape of k");
    call.k = static_cast<const float *>(k.data);
    call.v = static_cast<const float *>(v.data);
    call.q_stride = q_numbers;
    call.k_stride = call.v_stride = kv_numbers;
  } else {
    expect(q.shape[2] == q_numbers + 2 * kv_numbers, kQ, "(q_heads + 2 * kv_heads) * D numbers a row, without k and v");
    call.k = call.q + q_numbers;
    call.v = call.k + kv_numbers;
    call.q_stride = call.k_stride = call.v_stride = q.shape[2];
  }
  if (const OrtValue *value = optional(kPackedRows)) {
    const Tensor rows(api_, value);
    expect(rows.count() == call.rows, kPackedRows, "a place for each row of q");
    call.packed_rows = static_cast<const int64_t *>(rows.data);
  }
  if (const OrtValue *value = optional(kSinks)) {
    const Tensor sinks(api_, value);
    expect(sinks.count() == q_heads_, kSinks, "[q_heads]");
    call.sinks = static_cast<const float *>(sinks.data);
  }
  if (optional(kCosines) != nullptr || optional(kSines) != nullptr) {
    const Tensor cosines = tensor(kCosines), sines = tensor(kSines);
    expect(cosines.shape.size() == 2 && cosines.shape[1] == size / 2, kCosines, "[positions, D / 2]");
    expect(sines.shape == cosines.shape, kSines, "the shape of cosines");
    call.cosines = static_cast<const float *>(cosines.data);
    call.sines = static_cast<const float *>(sines.data);
    call.table_rows = cosines.shape[0];
  }
  call.tree_mask = static_cast<const uint8_t *>(mask.data);
  call.positions = static_cast<const int64_t *>(positions.data);
  call.cache_len = static_cast<const int64_t *>(cache_len.data);
  thread_local attention::Plan plan;
  if (const char *wrong = plan.make(call)) throw Refused(wrong);
  call.key_cache = present(context, kKeyCache, kPresentKey);
  call.value_cache = present(context, kValueCache, kPresentValue);
  const int64_t shape[] = {q.shape[0], q.shape[1], q_numbers};
  OrtValue *result = nullptr;
  check(api_.KernelContext_GetOutput(context, kOut, shape, 3, &result));
  void *out = nullptr;
  check(api_.GetTensorMutableData(result, &out));
  call.out = static_cast<float *>(out);
  const attention::Kernels &kernels = attention::kernels();
  attention::Plan &made = plan;  // a lambda of another thread would find that thread's own
  in_shares(api_, context, call.rows, call.rows * (q_numbers + kv_numbers) / kWrittenShare,
            [&](int64_t first, int64_t last) { kernels.write(made, first, last); });
  const auto shares = static_cast<int64_t>(plan.multiplications) / kShare;
  in_shares(api_, context, plan.attend_tasks(), shares,
            [&](int64_t first, int64_t last) { kernels.attend(made, first, last); });
  in_shares(api_, context, plan.merge_tasks(), shares,
            [&](int64_t first, int64_t last) { kernels.merge(made, first, last); });
}

}  // namespace redraft::operators
