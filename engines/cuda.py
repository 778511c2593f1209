"""The CUDA runtime by cuda-python: one stream of one GPU, memory, and graphs. A failure is one line with CUDA's name.

All work runs in order on the stream. It calls CUDA only after it finds the driver.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from redraft.engines.device import Array
from redraft.engines.gpu import find_gpu
from redraft.errors import BackendError

STAGING_BYTES = 1 << 22
_ALIGNMENT_BYTES = 64
_MEBIBYTE = 1 << 20


def open_cuda() -> Cuda:
    """Return the first visible GPU. Raises BackendError if driver, package or GPU is missing."""
    find_gpu()
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise BackendError(f"cuda-python cannot be imported ({error})", "run `pip install 'redraft[cuda]'`") from None
    return Cuda(runtime)


class Cuda:
    """A stream with its memory, copies and graphs. `runtime` is cuda.bindings.runtime. Use it from one thread.

    waits: number of the host's waits for the stream.   captured: number of graphs.   warned: True after the first
    warning that a graph cannot be captured.
    """

    def __init__(self, runtime: Any, staging_bytes: int = STAGING_BYTES) -> None:
        self._runtime = runtime
        self._success = runtime.cudaError_t.cudaSuccess
        self.call("cudaSetDevice", 0)
        self._stream = self.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self.stream = int(self._stream)
        _give_back(self, runtime, "cudaStreamDestroy", self._stream)
        self._pinned = Pinned(self, staging_bytes)
        self._staging = self._pinned.bytes
        self._staged = 0
        self._capturing = False
        self.waits = 0
        self.warned = False
        self.captured = 0

    def call(self, function: str, *arguments: Any) -> Any:
        """Return the function's results without its status. Raises BackendError with the error's name."""
        answer = getattr(self._runtime, function)(*arguments)
        if (status := answer[0]) != self._success:
            self.forget_error()
            raise BackendError(f"CUDA does not work: {function} failed with {getattr(status, 'name', status)}")
        return answer[1] if len(answer) == 2 else answer[1:]

    def forget_error(self) -> None:
        """Clear CUDA's last error, which CUDA would otherwise report for another launch."""
        self._runtime.cudaGetLastError()

    def free_bytes(self) -> int:
        """Return the free bytes of the device's memory."""
        free, _ = self.call("cudaMemGetInfo")
        return int(free)

    def write(self, address: int, values: Array) -> None:
        """Copy a C-contiguous array to the device, through pinned memory. The array may be reused at once.

        Raises BackendError if CUDA fails, also for earlier work on the stream. All later calls then raise it as well.
        """
        source = values.reshape(-1).view(np.uint8)
        for start in range(0, source.size, self._staging.size):
            piece = source[start : start + self._staging.size]
            staged = self._stage(piece.size)
            staged[:] = piece
            self.copy(address + start, staged.ctypes.data, piece.size, "cudaMemcpyHostToDevice")

    def read(self, address: int, values: Array) -> None:
        """Copy from the device into a C-contiguous array, after all earlier work, and wait."""
        target = values.reshape(-1).view(np.uint8)
        for start in range(0, target.size, self._staging.size):
            piece = target[start : start + self._staging.size]
            staged = self._stage(piece.size)
            self.copy(staged.ctypes.data, address + start, piece.size, "cudaMemcpyDeviceToHost")
            self.synchronize()
            piece[:] = staged

    def copy(self, target: int, source: int, size: int, kind: str) -> None:
        """Copy `size` bytes between two addresses; `kind` is a name of cudaMemcpyKind. Host memory must be pinned."""
        direction = getattr(self._runtime.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", target, source, size, direction, self._stream)

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        self.call("cudaStreamSynchronize", self._stream)
        self.waits += 1
        self._staged = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return the work that `run` puts on the stream as a graph, without running it. Raises BackendError."""
        self.call("cudaStreamBeginCapture", self._stream,
                  self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)  # fmt: skip
        self._capturing, collecting = True, gc.isenabled()
        gc.disable()  # CUDA forbids freeing memory during a capture
        try:
            run()
        except BaseException:
            status, graph = self._runtime.cudaStreamEndCapture(self._stream)  # leaves the stream usable
            if status == self._success:
                self._runtime.cudaGraphDestroy(graph)
            self.forget_error()
            raise
        finally:
            self._capturing = False
            if collecting:
                gc.enable()
        return Graph(self, self.call("cudaStreamEndCapture", self._stream))

    def _stage(self, size: int) -> Array:
        """Return pinned memory that no running copy uses."""
        if self._staged + size > self._staging.size:
            self.synchronize()
        piece: Array = self._staging[self._staged : self._staged + size]
        self._staged += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return piece


class Memory:
    """Zeroed memory of the device, freed with the object."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.size = size
        try:
            self.address = int(cuda.call("cudaMalloc", max(size, 1)))
        except BackendError as error:
            free = cuda.free_bytes()
            raise BackendError(
                f"{error.message}: {size / _MEBIBYTE:.1f} MiB asked for, {free / _MEBIBYTE:.1f} MiB free",
                "lower max_model_len or max_num_seqs, or free memory",
            ) from None
        _give_back(self, cuda._runtime, "cudaFree", self.address)
        cuda.call("cudaMemsetAsync", self.address, 0, max(size, 1), cuda._stream)


class Pinned:
    """Memory of the host that is not paged out and that the device copies directly, freed with the object.

    bytes: uint8[size].
    """

    def __init__(self, cuda: Cuda, size: int) -> None:
        self.address = int(cuda.call("cudaMallocHost", max(size, 1)))
        self.bytes: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        _give_back(self, cuda._runtime, "cudaFreeHost", self.address)


class Event:
    """An event of the stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._event = cuda.call("cudaEventCreate")
        _give_back(self, cuda._runtime, "cudaEventDestroy", self._event)

    def record(self) -> None:
        """Record the end of all earlier work; in a graph, once for each of its runs."""
        cuda = self._cuda
        if cuda._capturing:
            cuda.call("cudaEventRecordWithFlags", self._event, cuda._stream, cuda._runtime.cudaEventRecordExternal)
        else:
            cuda.call("cudaEventRecord", self._event, cuda._stream)

    def seconds_since(self, other: Event) -> float:
        """Return the time between two past events. Raises BackendError with cudaErrorNotReady if one is not past."""
        return float(self._cuda.call("cudaEventElapsedTime", other._event, self._event)) * 1e-3


class Graph:
    """Captured work that one launch puts on the stream."""

    def __init__(self, cuda: Cuda, graph: Any) -> None:
        self._cuda = cuda
        try:
            self._ready = cuda.call("cudaGraphInstantiate", graph, 0)
        finally:
            cuda.call("cudaGraphDestroy", graph)
        cuda.captured += 1
        _give_back(self, cuda._runtime, "cudaGraphExecDestroy", self._ready)

    def launch(self) -> None:
        """Put the work on the stream."""
        self._cuda.call("cudaGraphLaunch", self._ready, self._cuda._stream)


def _give_back(owner: object, runtime: Any, function: str, handle: Any) -> None:
    """Call `function` when `owner` is deleted, without a reference to it. At process end, the driver frees all."""
    weakref.finalize(owner, getattr(runtime, function), handle).atexit = False
