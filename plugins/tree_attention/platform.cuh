// Operations of the machine that the kernels use: thread index, barriers, asynchronous copies, matrix products of a
// warp. Two implementations: PTX here, and cpu/cuda_on_cpu.h, which runs the same kernels thread by thread on a CPU.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define REDRAFT_DEVICE __device__ __forceinline__
#define REDRAFT_ANYWHERE __host__ __device__ __forceinline__
#define REDRAFT_GLOBAL(threads) __global__ void __launch_bounds__(threads)

#else

#include "../cpu/cuda_on_cpu.h"
#define REDRAFT_ANYWHERE inline
#define REDRAFT_GLOBAL(threads) void

#endif

namespace redraft {

constexpr int kWarp = 32;

// Storage of the two 16-bit types; arithmetic is in float.
struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

// Sixteen bytes, the unit of memory accesses.
struct alignas(16) Chunk {
  uint32_t words[4];
};

#if defined(__CUDACC__)

REDRAFT_DEVICE unsigned char *shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

REDRAFT_DEVICE int thread_index() { return threadIdx.x; }
REDRAFT_DEVICE int block_index() { return blockIdx.x; }
REDRAFT_DEVICE int block_index_y() { return blockIdx.y; }
REDRAFT_DEVICE int block_count() { return gridDim.x; }
REDRAFT_DEVICE int block_count_y() { return gridDim.y; }
REDRAFT_DEVICE int block_threads() { return blockDim.x; }
REDRAFT_DEVICE void sync_block() { __syncthreads(); }
REDRAFT_DEVICE float shuffle_xor(float value, int lanes) { return __shfl_xor_sync(0xffffffffu, value, lanes); }
// Bit i is what lane i of the warp gives.
REDRAFT_DEVICE uint32_t ballot(bool given) { return __ballot_sync(0xffffffffu, given); }

REDRAFT_DEVICE uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory, or zeroes them without reading if `valid` is false.
REDRAFT_DEVICE void copy_async(void *target, const void *source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(target)), "l"(source),
               "r"(bytes)
               : "memory");
}

REDRAFT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most `kPending` of this thread's committed groups are unfinished.
template <int kPending>
REDRAFT_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
REDRAFT_DEVICE void load_matrices(uint32_t (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

REDRAFT_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum += a b for a of 16 x 16 and b of 16 x 8 16-bit elements (PTX mma.m16n8k16).
template <class T>
REDRAFT_DEVICE void multiply_add_k16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
REDRAFT_DEVICE void multiply_add_k16<Half>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
REDRAFT_DEVICE void multiply_add_k16<Bfloat16>(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for a of 16 x 8 and b of 8 x 8 TF32 elements (PTX mma.m16n8k8).
REDRAFT_DEVICE void multiply_add_k8(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The nearest TF32 value, ties away from zero, as bits of a float.
REDRAFT_DEVICE uint32_t round_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(value));
  return bits;
}

REDRAFT_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }

template <class T>
REDRAFT_DEVICE uint32_t pack(float low, float high);

template <>
REDRAFT_DEVICE uint32_t pack<Half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t &>(both);
}

template <>
REDRAFT_DEVICE uint32_t pack<Bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t &>(both);
}

// exp2f without its steps for results below 2^-126, which are zero here.
REDRAFT_DEVICE float power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(exponent));
  return power;
}

#endif  // __CUDACC__

}  // namespace redraft

#if !defined(__CUDACC__)
#include "../cpu/platform_cpu.h"
#endif
