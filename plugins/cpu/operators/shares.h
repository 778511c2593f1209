// Work of a call, shared by the session's threads.

#pragma once

#include <algorithm>

#include "values.h"

namespace redraft::operators {

constexpr int64_t kShare = int64_t{1} << 17;  // multiplications that are worth waking a thread for: about 5 us
constexpr int64_t kMostShares = 64;           // of a call; idle threads take the next one

// Calls run(first, last) for even shares of 0 .. count - 1, on the session's threads if there are several.
template <typename Run>
void in_shares(const OrtApi &api, OrtKernelContext *context, int64_t count, int64_t shares, const Run &run) {
  shares = std::min({shares, count, kMostShares});
  if (shares <= 1) return run(0, count);
  struct Task {
    const Run &run;
    int64_t count, shares;
  } task{run, count, shares};
  const auto one = [](void *data, size_t share) {
    const Task &task = *static_cast<const Task *>(data);
    const auto number = static_cast<int64_t>(share);
    task.run(task.count * number / task.shares, task.count * (number + 1) / task.shares);
  };
  check(api.KernelContext_ParallelFor(context, one, shares, 0, &task));
}

}  // namespace redraft::operators
