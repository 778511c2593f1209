// redraft::TreeAttention on CPUs: rotates and writes the new rows of a KV cache, and attends to the rows of each node's path.
//
// A cache holds fp32 or fp16 (IEEE binary16). New keys, after their rotation, and new values are rounded to its type: to
// nearest, ties to even, with subnormals, and within -65504 .. 65504. All rows are read as the cache holds them, those of
// this call too.
//
// Every node has the keys of the positions begin .. position, of its own path: the sequence's committed rows, which lie at
// the row of their position, then its ancestors and itself. If its mask shows a place after its own, as in a drafter's
// block, it has the keys of all places that the mask shows, in their order, as if these were such a path. Numbers are fp32
// and computed in this order:
//
//   x        = rotated (q) * scale; a rotation gives fma(x1, cos, -(x2 * sin)), fma(x1, sin, x2 * cos)
//   score    = fma over the numbers of a head in ascending order, from 0; then softcap * tanh(score / softcap)
//   block    = 256 positions, the first at a multiple of 256:
//              m = the largest score, p = exp(score - m), l = sum of p, in 16 lanes by position, then the lanes in halves,
//              o = fma of p and the values in ascending order of positions, from 0
//   result   = the blocks' m, l and o joined in ascending order, a sink last; o * (1 / l)
//
// So a row's result has the same bits whatever other rows, sequences, chunks, threads and instruction set it is computed
// with, and a node of a tree has those of the same text as a chain. A row that sees a NaN is NaN, with open payload.

#pragma once

#include <stdint.h>

#define REDRAFT_ATTENTION_ABI 4
#define REDRAFT_ATTENTION_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

REDRAFT_ATTENTION_API int redraft_attention_abi(void);

// "avx512", "avx2", "neon" or "scalar": the best that this CPU and build have, or the one in use.
REDRAFT_ATTENTION_API const char *redraft_attention_isa(void);

// Chooses an instruction set, for tests. Returns 0, or 1 if it is not there.
REDRAFT_ATTENTION_API int redraft_attention_use(const char *isa);

typedef struct {
  int64_t sequences, nodes, rows;       // B; T, most nodes of a sequence; N, nodes of all sequences
  int64_t capacity;                     // C, rows of a cache
  int64_t q_heads, kv_heads, head_dim;  // Hq, a multiple of Hkv; D, a multiple of 16 up to 256
  int64_t window, chunk;                // hide keys at p from q if q - p >= window or p / chunk < q / chunk; 0: none
  float scale, softcap;                 // softcap 0: none
  const float *q, *k, *v;               // of node n: q + n * q_stride [Hq * D], k + n * k_stride and v + … [Hkv * D]
  int64_t q_stride, k_stride, v_stride;
  void *key_cache, *value_cache;  // [B, Hkv, C, D]
  int64_t half;                   // 1: the caches hold fp16; 0: fp32
  const uint8_t *tree_mask;    // [B, T, T]: place j is i itself, an ancestor of i, which comes before it, or seen ahead
  const int64_t *positions;    // [N]; one outside cache_len .. cache_len + t sees what the nearest of them does
  const int64_t *cache_len;    // [B]
  const int64_t *packed_rows;  // [N], place b * T + t of each node, ascending; null: N = B * T, all places
  const float *sinks;          // [Hq]; null: none
  const float *cosines, *sines;     // [table_rows, D / 2], by position; null: no rotation
  int64_t table_rows, interleaved;  // interleaved: pairs are 2i, 2i + 1, otherwise i, i + D / 2
  float *out;                       // [N, Hq * D]
} redraft_attention_call;

// Computes one call on the calling thread. Returns null, or what is wrong with the call, before anything is written.
REDRAFT_ATTENTION_API const char *redraft_attention(const redraft_attention_call *call);

#ifdef __cplusplus
}
#endif
