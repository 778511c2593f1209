// Launches kernels on a device or in the CPU build, and words all failures.

#pragma once

#include <stdarg.h>
#include <stdio.h>

#include "platform.cuh"
#include "tree_attention.h"

namespace redraft {

// Stores a line for redraft_last_error and returns `code`.
int failed(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

constexpr int kMostDevices = 64;

struct Grid {
  int x;
  int y;
};

#if defined(__CUDACC__)

using Stream = cudaStream_t;

inline int current_device(int *device) {
  const cudaError_t status = cudaGetDevice(device);
  if (status != cudaSuccess) {
    return failed(REDRAFT_DEVICE_ERROR, "no CUDA device is usable: %s", cudaGetErrorString(status));
  }
  if (*device < kMostDevices) return REDRAFT_OK;
  return failed(REDRAFT_DEVICE_ERROR, "device: expected at most number %d, found %d", kMostDevices - 1, *device);
}

// Allows a kernel more shared memory than the default of 48 KiB a block, and as many blocks at once as shared memory
// allows.
template <class Kernel>
int allow_shared_memory(Kernel *kernel, int shared_bytes) {
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status == cudaSuccess) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess) return REDRAFT_OK;
  return failed(REDRAFT_DEVICE_ERROR, "the device does not give a block of the attention kernel %d bytes: %s",
                shared_bytes, cudaGetErrorString(status));
}

// Returns the blocks of a kernel that the device runs at once, or 0 with a failure. Call allow_shared_memory first.
template <class Kernel>
int resident_blocks(Kernel *kernel, int device, int threads, int shared_bytes) {
  int processors = 0;
  int each = 0;
  cudaError_t status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes);
  }
  if (status != cudaSuccess || each == 0) {
    failed(REDRAFT_DEVICE_ERROR, "the device cannot run the attention kernel: %s", cudaGetErrorString(status));
    return 0;
  }
  return processors * each;
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Grid grid, int threads, int shared_bytes, Stream stream,
           Arguments... arguments) {
  kernel<<<dim3(grid.x, grid.y), threads, shared_bytes, stream>>>(arguments...);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return REDRAFT_OK;
  return failed(REDRAFT_DEVICE_ERROR, "a kernel did not start: %s", cudaGetErrorString(status));
}

#else

using Stream = void *;

inline int current_device(int *device) {
  *device = 0;
  return REDRAFT_OK;
}

template <class Kernel>
int allow_shared_memory(Kernel *kernel, int shared_bytes) {
  cuda_on_cpu::allow_shared_memory(reinterpret_cast<const void *>(kernel), shared_bytes);
  return REDRAFT_OK;
}

template <class Kernel>
int resident_blocks(Kernel *, int, int, int) {
  return 6;
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Grid grid, int threads, int shared_bytes, Stream, Arguments... arguments) {
  if (const char *reason =
          cuda_on_cpu::refusal(reinterpret_cast<const void *>(kernel), grid.x, grid.y, threads, shared_bytes)) {
    return failed(REDRAFT_DEVICE_ERROR, "a kernel did not start: %s", reason);
  }
  cuda_on_cpu::launch(grid.x, grid.y, threads, shared_bytes, [&] { kernel(arguments...); });
  return REDRAFT_OK;
}

#endif

}  // namespace redraft
