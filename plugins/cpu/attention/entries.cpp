// The C entries, which choose an instruction set and call it.

#include "../chosen.h"
#include "attention.h"
#include "gate.h"
#include "plan.h"

namespace redraft::attention {
namespace {

const Kernels *const kAll[] = {
#ifdef REDRAFT_AVX512
    &kAvx512,
#endif
#ifdef REDRAFT_AVX2
    &kAvx2,
#endif
#ifdef REDRAFT_NEON
    &kNeon,
#endif
    &kScalar,
};

Chosen chosen(kAll);

}  // namespace

const Kernels &kernels() { return chosen.get(); }

}  // namespace redraft::attention

using namespace redraft::attention;

int redraft_attention_abi(void) { return REDRAFT_ATTENTION_ABI; }

const char *redraft_attention_isa(void) { return kernels().isa; }

int redraft_attention_use(const char *isa) { return chosen.use(isa); }

const char *redraft_attention(const redraft_attention_call *call) {
  thread_local Plan plan;
  if (const char *wrong = plan.make(*call)) return wrong;
  kernels().write(plan, 0, call->rows);
  kernels().attend(plan, 0, plan.attend_tasks());
  kernels().merge(plan, 0, plan.merge_tasks());
  return nullptr;
}

void redraft_gate(const redraft_gate_call *call, int64_t first, int64_t last) { kernels().gate(*call, first, last); }
