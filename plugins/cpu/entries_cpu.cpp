// What the CPU build offers beyond the C entries.

#include "../tree_attention/tree_attention.h"
#include "cuda_on_cpu.h"

extern "C" {

// Order in which threads and blocks of later calls on this OS thread take turns; see cuda_on_cpu::set_order.
REDRAFT_API void redraft_cpu_set_order(unsigned order) { cuda_on_cpu::set_order(order); }
}
