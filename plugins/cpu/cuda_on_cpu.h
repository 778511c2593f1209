// Runs CUDA kernels on a CPU, one thread block at a time, each CUDA thread a fiber: for tests of kernels where there is
// no GPU. What it holds of the real thing:
//
//   barriers        a fiber runs until it reaches a barrier or an operation of its warp, in an order that the test
//                   chooses, so that a barrier left out shows as a wrong result under some order;
//   copies          cp.async writes at once or only when a wait covers it, as the test chooses: both are allowed, so that
//                   a wait left out shows, and a copy over what another warp still reads;
//   shared memory   starts as NaN in every block;
//   matrix products of 16-bit elements and of TF32, with the operand layout of the PTX ISA, float32 sums;
//   divergence      a barrier or warp operation that some thread never reaches ends the process with a message.
//
// It does not hold memory ordering between blocks, tensor cores' order of summation, or speed.

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define REDRAFT_DEVICE inline

namespace cuda_on_cpu {

struct Position {
  int thread;
  int block;
  int block_y;
  int blocks;
  int blocks_y;
  int threads;
};

// Where the running fiber is.
extern thread_local Position here;

// Runs `kernel` once for every thread of a grid of blocks_x * blocks_y blocks.
void launch(int blocks_x, int blocks_y, int threads, size_t shared_bytes, const std::function<void()> &kernel);

// Order in which fibers take turns in launches of this OS thread: 0 ascending, 1 descending, else shuffled anew from
// this seed at every round, in which half of the warps rest; blocks likewise. Odd orders copy at once, even ones late.
void set_order(unsigned order);

unsigned char *shared_memory();
void sync_block();

constexpr int kLaneBytes = 32;
struct Lanes {
  unsigned char bytes[32][kLaneBytes];
};

// Every lane of a warp gives `size` bytes; all see what all gave, until the warp's next but one exchange.
const Lanes &exchange(const void *given, size_t size);

void copy_async(void *target, const void *source, bool valid);
void commit_copies();
void wait_copies(int pending);

// Conversions of 16-bit types, to the nearest, ties to even.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
float bfloat16_to_float(uint16_t bits);
uint16_t float_to_bfloat16(float value);

}  // namespace cuda_on_cpu
