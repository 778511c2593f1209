// Chooses one of the compiled kernels by sizes at run time. Each element type has its own source file.

#pragma once

#include <atomic>

#include "attend.cuh"
#include "launch.cuh"

namespace redraft {

enum class Action { kPlan, kRun };

// From this number of blocks a unit on, a row has so many partial results that all warps of a block sum it.
constexpr int kManyParts = 8;

// Merges the units that several of the attention kernel's blocks share, by a grid that depends on sizes only.
template <class Shape>
int launch_merge(const Problem &problem, int blocks, Stream stream) {
  const int rows = problem.nodes * problem.group;
  const int most_rows = rows < Shape::kRows ? rows : Shape::kRows;
  const int64_t units = static_cast<int64_t>(problem.batch) * problem.kv_heads * ((rows - 1) / Shape::kRows + 1);
  if (units * kManyParts <= blocks) {
    constexpr int kBytes = kWarps * Shape::kHeadDim * static_cast<int>(sizeof(float));
    return launch(merge<Shape, kWarps>, Grid{static_cast<int>(units), most_rows}, kThreads, kBytes, stream, problem,
                  blocks, MergeBy::kUnit);
  }
  const bool by_unit = units < blocks;
  const Grid grid{by_unit ? static_cast<int>(units) : blocks - 1, (most_rows + kWarps - 1) / kWarps};
  return launch(merge<Shape, 1>, grid, kThreads, 0, stream, problem, blocks, by_unit ? MergeBy::kUnit : MergeBy::kSeam);
}

template <class Shape>
int attend_with(const Problem &problem, int blocks, Action action, redraft_attention_plan &plan, Stream stream) {
  static std::atomic<int> resident[kMostDevices];
  static std::atomic<bool> allowed[kMostDevices];
  // A plan with given blocks needs no device.
  if (blocks == 0 || action == Action::kRun) {
    int device = 0;
    if (const int status = current_device(&device)) return status;
    if (!allowed[device]) {
      if (const int status = allow_shared_memory(attend<Shape>, Shape::kSharedBytes)) return status;
      allowed[device] = true;
    }
    if (resident[device] == 0) {
      resident[device] = resident_blocks(attend<Shape>, device, kThreads, Shape::kSharedBytes);
    }
    if (resident[device] == 0) return REDRAFT_DEVICE_ERROR;
    if (blocks == 0) blocks = resident[device];
  }
  plan.rows = Shape::kRows;
  plan.tile = Shape::kTile;
  plan.ctas = blocks;
  plan.threads = kThreads;
  plan.shared_bytes = Shape::kSharedBytes;
  plan.partial_bytes = 2ll * blocks * Shape::kRows * (Shape::kHeadDim + 2) * static_cast<int>(sizeof(float));
  if (action == Action::kPlan) return REDRAFT_OK;
  const int status = launch(attend<Shape>, Grid{blocks, 1}, kThreads, Shape::kSharedBytes, stream, problem);
  if (status != REDRAFT_OK || blocks == 1) return status;
  return launch_merge<Shape>(problem, blocks, stream);
}

// The smallest tile that holds all query rows of a unit, or else the largest tile.
template <class T, int kHeadDim>
int attend_rows(const Problem &problem, int blocks, Action action, redraft_attention_plan &plan, Stream stream) {
  using Narrow = AttentionShape<T, kHeadDim, 1>;
  using Middle = AttentionShape<T, kHeadDim, 2>;
  using Wide = AttentionShape<T, kHeadDim, 4>;
  const int rows = problem.nodes * problem.group;
  static_assert(Middle::kFits, "every element type and head size has two rows of warps");
  if constexpr (Narrow::kFits) {
    if (rows <= Narrow::kRows) return attend_with<Narrow>(problem, blocks, action, plan, stream);
  }
  if constexpr (Wide::kFits) {
    if (rows > Middle::kRows) return attend_with<Wide>(problem, blocks, action, plan, stream);
  }
  return attend_with<Middle>(problem, blocks, action, plan, stream);
}

template <class T>
int attend_head(int head_dim, const Problem &problem, int blocks, Action action, redraft_attention_plan &plan,
                Stream stream) {
  switch (head_dim) {
    case 64: return attend_rows<T, 64>(problem, blocks, action, plan, stream);
    case 80: return attend_rows<T, 80>(problem, blocks, action, plan, stream);
    case 96: return attend_rows<T, 96>(problem, blocks, action, plan, stream);
    case 128: return attend_rows<T, 128>(problem, blocks, action, plan, stream);
    case 256: return attend_rows<T, 256>(problem, blocks, action, plan, stream);
    default: return failed(REDRAFT_INVALID, "head_dim: expected 64, 80, 96, 128 or 256, found %d", head_dim);
  }
}

int attend_half(int head_dim, const Problem &, int blocks, Action, redraft_attention_plan &, Stream);
int attend_bfloat16(int head_dim, const Problem &, int blocks, Action, redraft_attention_plan &, Stream);
int attend_float(int head_dim, const Problem &, int blocks, Action, redraft_attention_plan &, Stream);

}  // namespace redraft
