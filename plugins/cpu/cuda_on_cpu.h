// Runs CUDA kernels on a CPU, one thread block at a time, each CUDA thread as a fiber: for kernel tests without a GPU.
// It models:
//
//   barriers        a fiber runs until it reaches a barrier or a warp operation, in an order that the test chooses. A
//                   missing barrier thus gives a wrong result under some order.
//   copies          cp.async writes at once, or only when a wait covers it, as the test chooses. CUDA allows both.
//                   Tests thus find a missing wait, and a copy over bytes that another warp still reads.
//   shared memory   starts as NaN in every block.
//   matrix products of 16-bit elements and of TF32, with the operand layout of the PTX ISA, summed in float32 to the
//                   nearest or like measured tensor cores (Sums), as the test chooses.
//   divergence      a barrier or warp operation that some thread never reaches ends the process with a message.
//   addresses       cp.async and ldmatrix of addresses that are not at multiples of 16 bytes, or outside of the block's
//                   shared memory, end the process with a message.
//   launches        fail with more than 48 KiB of shared memory that was not allowed, or with grids past the limits.
//
// It does not model memory ordering between blocks, or speed.

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

// Block and thread of the running fiber.
extern thread_local Position here;

// Allows the kernel at this address more shared memory than the 48 KiB of every kernel.
void allow_shared_memory(const void *kernel, size_t bytes);

// Returns a device's reason to refuse such a launch of the kernel at this address, or null.
const char *refusal(const void *kernel, int64_t blocks_x, int64_t blocks_y, int threads, size_t shared_bytes);

// Runs `kernel` once for every thread of a grid of blocks_x * blocks_y blocks.
void launch(int blocks_x, int blocks_y, int threads, size_t shared_bytes, const std::function<void()> &kernel);

// Sets the order in which fibers take turns in launches of this OS thread: 0 ascending, 1 descending. Any other value
// is a seed: every round has a new random order, in which half of the warps pause. Blocks follow the same order. Odd
// orders copy at once, even ones late.
void set_order(unsigned order);

// The way to sum matrix products in launches of this OS thread.
//   kNearest    in float32, to the nearest, one term after the other.
//   kTruncated  like tensor cores (Fasi et al. 2021): products are exact. The sum so far and four products are
//               aligned to the largest, truncated towards zero below a float's last place, added, and the total is
//               truncated to a float. Later tensor cores add more products at once and keep a few more bits, so this
//               is coarser.
enum class Sums { kNearest, kTruncated };
void set_sums(Sums sums);
Sums sums();

// Adds `terms` like kTruncated: terms[0] is the sum so far, followed by `count - 1` products.
float truncated_sum(const double *terms, int count);

unsigned char *shared_memory();
void sync_block();

// Ends the process unless 16 bytes at `address` are shared memory of this block, at a multiple of 16 bytes.
void check_shared(const char *what, const void *address);

constexpr int kLaneBytes = 32;
struct Lanes {
  unsigned char bytes[32][kLaneBytes];
};

// Every lane of a warp gives `size` bytes. All lanes see all bytes until the warp's next exchange but one.
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
