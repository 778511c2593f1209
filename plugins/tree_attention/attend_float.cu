#include "dispatch.cuh"

namespace redraft {

int attend_float(int head_dim, const Problem &problem, int blocks, Action action, redraft_attention_plan &plan,
                 Stream stream) {
  return attend_head<float>(head_dim, problem, blocks, action, plan, stream);
}

}  // namespace redraft
