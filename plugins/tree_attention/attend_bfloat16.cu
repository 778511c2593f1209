#include "dispatch.cuh"

namespace redraft {

int attend_bfloat16(int head_dim, const Problem &problem, int blocks, Action action, redraft_attention_plan &plan,
                    Stream stream) {
  return attend_head<Bfloat16>(head_dim, problem, blocks, action, plan, stream);
}

}  // namespace redraft
