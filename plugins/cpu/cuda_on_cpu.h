// Runs CUDA kernels on a CPU, one thread block at a time, each CUDA thread a fiber: for tests of kernels where there is
// no GPU. What it holds of the real thing:
//
//   barriers        a fiber runs until it reaches a barrier or an operation of its warp, in an order that the test
//                   chooses, so that a barrier left out shows as a wrong result under some order;
//   copies          cp.async writes at once or only when a wait covers it, as the test chooses: both are allowed, so that
//                   a wait left out shows, and a copy over what another warp still reads;
//   shared memory   starts as NaN in every block;
//   matrix products of 16-bit elements and of TF32, with the operand layout of the PTX ISA, summed in float32 to the
//                   nearest or as tensor cores were found to (Sums), as the test chooses;
//   divergence      a barrier or warp operation that some thread never reaches ends the process with a message;
//   addresses       cp.async and ldmatrix of addresses that are not at multiples of 16 bytes, or outside of the block's
//                   shared memory, end the process with a message;
//   launches        of more than 48 KiB of shared memory without leave, or of grids past the limits, fail.
//
// It does not hold memory ordering between blocks, or speed.

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

// Shared memory that a kernel at this address may ask for from now on, beyond the 48 KiB of every kernel.
void allow_shared_memory(const void *kernel, size_t bytes);

// Why a device would refuse such a launch of the kernel at this address, or null.
const char *refusal(const void *kernel, int64_t blocks_x, int64_t blocks_y, int threads, size_t shared_bytes);

// Runs `kernel` once for every thread of a grid of blocks_x * blocks_y blocks.
void launch(int blocks_x, int blocks_y, int threads, size_t shared_bytes, const std::function<void()> &kernel);

// Order in which fibers take turns in launches of this OS thread: 0 ascending, 1 descending, else shuffled anew from
// this seed at every round, in which half of the warps rest; blocks likewise. Odd orders copy at once, even ones late.
void set_order(unsigned order);

// How matrix products are summed in launches of this OS thread.
//   kNearest    in float32, to the nearest, a term after the other;
//   kTruncated  as tensor cores do (Fasi et al. 2021): products exact; the sum so far and four products are aligned to
//               the largest of them, cut off towards zero below a float's last place and added, and the total is cut
//               off to a float. Later tensor cores add more products at once and keep a few bits more: this is coarser.
enum class Sums { kNearest, kTruncated };
void set_sums(Sums sums);
Sums sums();

// `terms[0]` the sum so far, then `count - 1` products; what kTruncated makes of them.
float truncated_sum(const double *terms, int count);

unsigned char *shared_memory();
void sync_block();

// Ends the process unless 16 bytes at `address` are shared memory of this block, at a multiple of 16 bytes.
void check_shared(const char *what, const void *address);

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
