// The C entries. They check arguments by name, divide the scratch memory and launch the kernels.

#include "dispatch.cuh"
#include "rows.cuh"

namespace redraft {

namespace {

thread_local char last_error[256] = "no failure so far";

int element_bytes(int dtype) { return dtype == REDRAFT_FLOAT32 ? 4 : 2; }

int check_positive(const char *name, int found) {
  if (found >= 1) return REDRAFT_OK;
  return failed(REDRAFT_INVALID, "%s: expected 1 or more, found %d", name, found);
}

int check_sizes(int dtype, int batch, int kv_heads, int head_dim, int capacity) {
  if (dtype < REDRAFT_FLOAT16 || dtype > REDRAFT_FLOAT32) {
    return failed(REDRAFT_INVALID, "dtype: expected 0 (float16), 1 (bfloat16) or 2 (float32), found %d", dtype);
  }
  if (const int status = check_positive("batch", batch)) return status;
  if (const int status = check_positive("kv_heads", kv_heads)) return status;
  if (const int status = check_positive("capacity", capacity)) return status;
  if (head_dim != 64 && head_dim != 80 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    return failed(REDRAFT_INVALID, "head_dim: expected 64, 80, 96, 128 or 256, found %d", head_dim);
  }
  return REDRAFT_OK;
}

int check_pointer(const char *name, const void *pointer, size_t alignment) {
  if (pointer == nullptr) return failed(REDRAFT_INVALID, "%s: expected a pointer, found null", name);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
    return failed(REDRAFT_INVALID, "%s: expected an address at a multiple of %zu bytes, found %p", name, alignment,
                  pointer);
  }
  return REDRAFT_OK;
}

int check_shapes(const redraft_tree_attention_args &args) {
  if (const int status = check_sizes(args.dtype, args.batch, args.kv_heads, args.head_dim, args.capacity)) {
    return status;
  }
  if (const int status = check_positive("nodes", args.nodes)) return status;
  if (args.q_heads < 1 || args.q_heads % args.kv_heads != 0) {
    return failed(REDRAFT_INVALID, "q_heads: expected a multiple of kv_heads = %d, found %d", args.kv_heads,
                  args.q_heads);
  }
  if (args.nodes > args.capacity) {
    return failed(REDRAFT_INVALID, "nodes: expected at most capacity = %d, found %d", args.capacity, args.nodes);
  }
  if (args.capacity > INT32_MAX - args.nodes) {
    return failed(REDRAFT_INVALID, "capacity: expected at most %d with %d nodes, found %d", INT32_MAX - args.nodes,
                  args.nodes, args.capacity);
  }
  if (static_cast<int64_t>(args.nodes) * args.q_heads > INT32_MAX / 2) {
    return failed(REDRAFT_INVALID, "nodes: expected at most %d with q_heads = %d, found %d",
                  INT32_MAX / 2 / args.q_heads, args.q_heads, args.nodes);
  }
  const bool masked = args.mask_bits || args.mask_bools;
  if (masked && args.nodes > REDRAFT_MAX_TREE_NODES) {
    return failed(REDRAFT_INVALID, "nodes: expected at most %d under a mask, found %d", REDRAFT_MAX_TREE_NODES,
                  args.nodes);
  }
  if (args.mask_bits && args.mask_bools) {
    return failed(REDRAFT_INVALID, "mask_bits and mask_bools: expected one of them, found both");
  }
  if (args.window < 0) return failed(REDRAFT_INVALID, "window: expected 0 or more, found %d", args.window);
  if (!(args.softcap >= 0.f)) {
    return failed(REDRAFT_INVALID, "softcap: expected 0 or more, found %g", static_cast<double>(args.softcap));
  }
  if (!(args.scale - args.scale == 0.f)) {
    return failed(REDRAFT_INVALID, "scale: expected a finite number, found %g", static_cast<double>(args.scale));
  }
  if (args.ctas < 0 || args.ctas > 65535) {
    return failed(REDRAFT_INVALID, "ctas: expected 0 to 65535, found %d", args.ctas);
  }
  return REDRAFT_OK;
}

int check_pointers(const redraft_tree_attention_args &args) {
  const struct {
    const char *name;
    const void *pointer;
    size_t alignment;
    bool needed;
  } pointers[] = {
      {"q", args.q, 16, true},
      {"out", args.out, 16, true},
      {"key_cache", args.key_cache, 16, true},
      {"value_cache", args.value_cache, 16, true},
      {"cache_len", args.cache_len, 8, true},
      {"k", args.k, 16, args.k != nullptr || args.v != nullptr},
      {"v", args.v, 16, args.k != nullptr || args.v != nullptr},
      {"mask_bits", args.mask_bits, 4, args.mask_bits != nullptr},
      {"positions", args.positions, 8, args.window > 0 && (args.mask_bits || args.mask_bools)},
      {"node_counts", args.node_counts, 8, args.node_counts != nullptr},
  };
  for (const auto &each : pointers) {
    if (!each.needed) continue;
    if (const int status = check_pointer(each.name, each.pointer, each.alignment)) return status;
  }
  return REDRAFT_OK;
}

Problem problem_of(const redraft_tree_attention_args &args, void *workspace) {
  Problem problem{};
  problem.q = args.q;
  problem.out = args.out;
  problem.k = args.k;
  problem.v = args.v;
  problem.key_cache = args.key_cache;
  problem.value_cache = args.value_cache;
  problem.mask_bits = args.mask_bits;
  problem.mask_bools = args.mask_bools;
  problem.positions = problem.masked() ? args.positions : nullptr;
  problem.cache_len = args.cache_len;
  problem.node_counts = args.node_counts;
  problem.partials = static_cast<float *>(workspace);
  problem.batch = args.batch;
  problem.nodes = args.nodes;
  problem.q_heads = args.q_heads;
  problem.kv_heads = args.kv_heads;
  problem.group = args.q_heads / args.kv_heads;
  problem.capacity = args.capacity;
  problem.mask_words = (args.nodes + 31) / 32;
  problem.window = args.window;
  problem.scale = args.scale;
  problem.softcap = args.softcap;
  return problem;
}

int attend_any(const redraft_tree_attention_args &args, const Problem &problem, Action action,
               redraft_attention_plan &plan, Stream stream) {
  switch (args.dtype) {
    case REDRAFT_FLOAT16: return attend_half(args.head_dim, problem, args.ctas, action, plan, stream);
    case REDRAFT_BFLOAT16: return attend_bfloat16(args.head_dim, problem, args.ctas, action, plan, stream);
    default: return attend_float(args.head_dim, problem, args.ctas, action, plan, stream);
  }
}

// Blocks for `items` threads, at most as many as keep a device busy.
int copy_blocks(int64_t items) {
  constexpr int64_t kMost = 1024;
  const int64_t blocks = (items + kCopyThreads - 1) / kCopyThreads;
  return static_cast<int>(blocks < kMost ? blocks : kMost);
}

}  // namespace

int failed(int code, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return code;
}

}  // namespace redraft

using namespace redraft;

extern "C" {

int redraft_tree_attention_plan(const redraft_tree_attention_args *args, redraft_attention_plan *plan) {
  if (!args || !plan) return failed(REDRAFT_INVALID, "args and plan: expected pointers, found null");
  if (const int status = check_shapes(*args)) return status;
  *plan = redraft_attention_plan{};
  return attend_any(*args, problem_of(*args, nullptr), Action::kPlan, *plan, nullptr);
}

int redraft_tree_attention_workspace(const redraft_tree_attention_args *args, size_t *bytes) {
  if (!bytes) return failed(REDRAFT_INVALID, "bytes: expected a pointer, found null");
  redraft_attention_plan plan;
  if (const int status = redraft_tree_attention_plan(args, &plan)) return status;
  *bytes = static_cast<size_t>(plan.partial_bytes);
  return REDRAFT_OK;
}

int redraft_tree_attention(const redraft_tree_attention_args *args, void *workspace, size_t workspace_bytes,
                           void *stream) {
  size_t needed = 0;
  if (const int status = redraft_tree_attention_workspace(args, &needed)) return status;
  if (const int status = check_pointers(*args)) return status;
  if (const int status = check_pointer("workspace", workspace, 16)) return status;
  if (workspace_bytes < needed) {
    return failed(REDRAFT_INVALID, "workspace: expected %zu bytes, found %zu", needed, workspace_bytes);
  }
  redraft_attention_plan plan{};
  return attend_any(*args, problem_of(*args, workspace), Action::kRun, plan, static_cast<Stream>(stream));
}

int redraft_compact(const redraft_compact_args *args, void *stream) {
  if (!args) return failed(REDRAFT_INVALID, "args: expected a pointer, found null");
  if (const int status = check_sizes(args->dtype, args->batch, args->kv_heads, args->head_dim, args->capacity)) {
    return status;
  }
  if (const int status = check_positive("cache_count", args->cache_count)) return status;
  if (const int status = check_positive("max_path", args->max_path)) return status;
  if (const int status = check_pointer("caches", args->caches, 8)) return status;
  if (const int status = check_pointer("cache_len", args->cache_len, 8)) return status;
  if (const int status = check_pointer("paths", args->paths, 8)) return status;
  if (const int status = check_pointer("path_lengths", args->path_lengths, 8)) return status;
  Compact work{};
  work.caches = args->caches;
  work.cache_len = args->cache_len;
  work.paths = args->paths;
  work.path_lengths = args->path_lengths;
  work.cache_count = args->cache_count;
  work.batch = args->batch;
  work.kv_heads = args->kv_heads;
  work.capacity = args->capacity;
  work.max_path = args->max_path;
  work.chunks = args->head_dim * element_bytes(args->dtype) / 16;
  const int64_t columns = static_cast<int64_t>(work.cache_count) * work.batch * work.kv_heads * work.chunks;
  return launch(compact, Grid{copy_blocks(columns), 1}, kCopyThreads, 0, static_cast<Stream>(stream), work);
}

const char *redraft_last_error(void) { return last_error; }

int redraft_kernels_abi(void) { return REDRAFT_KERNELS_ABI; }

}  // extern "C"
