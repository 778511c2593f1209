// C entries of the tree-attention kernels, for programs that pass device pointers and a stream: PyTorch, CuPy, ONNX
// Runtime, TensorRT. The CPU build has the same entries over host pointers and ignores the stream.
//
// Every entry returns 0 or an error code and never synchronizes. `redraft_last_error` returns one line with the
// expected and the found value. Calls are safe from several threads and can be captured in a CUDA graph: device
// memory (lengths, trees) may change between replays, argument structs may not. The device that owns the stream and
// the pointers must be the calling thread's current one; no entry sets it.

#ifndef REDRAFT_TREE_ATTENTION_H_
#define REDRAFT_TREE_ATTENTION_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define REDRAFT_API __declspec(dllexport)
#else
#define REDRAFT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { REDRAFT_OK = 0, REDRAFT_INVALID = 1, REDRAFT_DEVICE_ERROR = 2 };
enum { REDRAFT_FLOAT16 = 0, REDRAFT_BFLOAT16 = 1, REDRAFT_FLOAT32 = 2 };

// Increases when a struct below or the meaning of a field changes.
#define REDRAFT_KERNELS_ABI 2
// Largest number of nodes of a tree, which a mask describes. Causal chunks may be longer.
#define REDRAFT_MAX_TREE_NODES 4096

// Attention of B sequences, T query nodes each, over a KV cache that holds `cache_len` committed rows and then the
// rows of the nodes themselves. Query head h reads key head h / (q_heads / kv_heads). Node i of sequence b sees the
// committed rows and the nodes of its mask (always itself and its ancestors), except those that `window` hides.
//
// Tensors are contiguous. Lengths, positions and masks have their own types; all others have `dtype` and begin at a
// multiple of 16 bytes. `out` must not overlap q, k, v or the caches, nor the caches k and v: blocks write these while
// others still read those.
typedef struct {
  int32_t dtype;               // REDRAFT_FLOAT16, REDRAFT_BFLOAT16 or REDRAFT_FLOAT32; sums are always float32
  int32_t batch;               // B
  int32_t nodes;               // T
  int32_t q_heads;             // Hq, a multiple of kv_heads
  int32_t kv_heads;            // Hkv
  int32_t head_dim;            // D: 64, 80, 96, 128 or 256
  int32_t capacity;            // C, rows of a sequence's cache
  int32_t window;              // > 0 hides a key at position p from a query at position q if q - p >= window
  float scale;                 // multiplies q . k
  float softcap;               // c > 0 replaces a score s by c tanh(s / c)
  int32_t ctas;                // blocks of the attention kernel; 0: as many as the device runs at once
  const void *q;               // [B, T, Hq * D]
  const void *k;               // [B, T, Hkv * D], new rows, written to the cache; null: the cache has them already
  const void *v;               // [B, T, Hkv * D], null if k is null
  void *key_cache;             // [B, Hkv, C, D]; rows from cache_len + T on are never read
  void *value_cache;           // [B, Hkv, C, D]
  const uint32_t *mask_bits;   // [B, T, ceil(T / 32)], bit j of node i's row: i sees node j; null: see below
  const uint8_t *mask_bools;   // [B, T, T], the same, a byte for each bit; both null: node i sees 0 .. i (causal)
  const int64_t *positions;    // [B, T], cache_len <= position < cache_len + T; read only for windowed trees
  const int64_t *cache_len;    // [B]; a length outside 0 .. C counts as the nearest one inside
  const int64_t *node_counts;  // [B], nodes of each tree; null: T. Rows of other nodes are not written, their out is 0
  void *out;                   // [B, T, Hq * D]
} redraft_tree_attention_args;

// Tiles, blocks and scratch memory of a call, for profiles and for choosing `ctas`.
typedef struct {
  int32_t rows;           // query rows of a unit of work, which share each key tile
  int32_t tile;           // keys of a tile
  int32_t ctas;           // blocks of the attention kernel
  int32_t threads;        // of a block
  int64_t shared_bytes;   // of a block
  int64_t partial_bytes;  // of scratch memory, written and read at most once
} redraft_attention_plan;

// Depends only on sizes, `ctas`, the device, and on masks being null or not; reads no pointer.
REDRAFT_API int redraft_tree_attention_plan(const redraft_tree_attention_args *args, redraft_attention_plan *plan);

// Returns the bytes of scratch memory that a call with these sizes needs: the plan's partial_bytes.
REDRAFT_API int redraft_tree_attention_workspace(const redraft_tree_attention_args *args, size_t *bytes);

// Writes k and v into the cache and attends, with at most two launches: one that does both, and one that merges results
// of sequences and heads that several blocks share. `workspace` is device memory at a multiple of 16 bytes. A node whose
// row is past the capacity is not written, not seen, and has an unspecified finite out.
REDRAFT_API int redraft_tree_attention(const redraft_tree_attention_args *args, void *workspace, size_t workspace_bytes,
                                       void *stream);

// Makes the rows of accepted nodes contiguous in all caches at once: row cache_len + paths[b][i] moves to row
// cache_len + 1 + i (the root's row stays). Paths of a tree increase, so rows move in place.
typedef struct {
  int32_t dtype;
  int32_t cache_count;  // key and value caches of all layers
  int32_t batch;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t capacity;
  int32_t max_path;             // P
  void *const *caches;          // device array of cache_count pointers to [B, Hkv, C, D]
  const int64_t *cache_len;     // [B]
  const int64_t *paths;         // [B, P], accepted nodes after the root; entries outside 1 .. C - 1 - cache_len stay
  const int64_t *path_lengths;  // [B], 0 .. P
} redraft_compact_args;

REDRAFT_API int redraft_compact(const redraft_compact_args *args, void *stream);

// Returns one line on the last failure of this thread, never null.
REDRAFT_API const char *redraft_last_error(void);
REDRAFT_API int redraft_kernels_abi(void);

#ifdef __cplusplus
}
#endif

#endif  // REDRAFT_TREE_ATTENTION_H_
