// redraft::SiluGate on CPUs: the gate of a feed-forward layer. For each row of n gates g and n values u,
//
//   e = exp(-|g|), by the polynomial of attention
//   y = g * ((g < 0 ? e : 1) / (1 + e)) * u * factor, in fp32 and in this order
//
// A number's result has the same bits in every row, batch, thread and instruction set. A NaN gives a NaN.

#pragma once

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t n;
  const float *x;        // [rows, 2 * n], gates first
  const float *factors;  // [n]; null: none
  float *y;              // [rows, n]
} redraft_gate_call;

// Computes rows first .. last - 1 of a call.
REDRAFT_ATTENTION_API void redraft_gate(const redraft_gate_call *call, int64_t first, int64_t last);

#ifdef __cplusplus
}
#endif
