// Entries that only the CPU build has.

#include "../tree_attention/tree_attention.h"
#include "cuda_on_cpu.h"

extern "C" {

// Sets the order in which threads and blocks of later calls on this OS thread take turns; see cuda_on_cpu::set_order.
REDRAFT_API void redraft_cpu_set_order(unsigned order) { cuda_on_cpu::set_order(order); }

// Truncates sums of matrix products in later calls on this OS thread like tensor cores if true; see cuda_on_cpu::Sums.
REDRAFT_API void redraft_cpu_truncate_sums(int truncate) {
  cuda_on_cpu::set_sums(truncate ? cuda_on_cpu::Sums::kTruncated : cuda_on_cpu::Sums::kNearest);
}
}
