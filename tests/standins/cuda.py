"""A CUDA runtime over host memory: work runs only when the host waits for its stream, so tests find stale reads.

`FakeCuda` stands for the module cuda.bindings.runtime. Fresh memory is poisoned. Every copy must stay within one
allocation. Calls that CUDA forbids while a graph is captured are errors here too.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[], None]
POISON = 0xA5
ALIGNMENT = 256
"""Alignment of CUDA's allocations, and of every address for TensorRT."""


class Status(IntEnum):
    """The needed values of cudaError_t."""

    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


class FakeCuda:
    """See the module.

    total:    bytes of the device's memory.
    queued:   work on the stream.   living: numbers of streams, events and graphs by kind.
    launches: number of graphs that were launched.
    """

    cudaError_t = Status
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="to", cudaMemcpyDeviceToHost="from",
                                     cudaMemcpyDeviceToDevice="within")  # fmt: skip
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaStreamNonBlocking = 1
    cudaEventRecordExternal = 1
    STREAM = 77

    def __init__(self, total: int = 1 << 30) -> None:
        self.total = total
        self.queued: list[Work] = []
        self.captured: list[Work] | None = None
        self.launches = 0
        self.copies: list[tuple[str, int]] = []
        self.moments: dict[int, int] = {}
        self.living: Counter[str] = Counter()
        self._memory: dict[int, tuple[str, np.ndarray]] = {}
        self._starts: list[int] = []
        self.kept = Status.cudaSuccess
        self._moment = 0

    def put(self, work: Work) -> None:
        """Queue work, or add it to the graph that is being captured."""
        (self.queued if self.captured is None else self.captured).append(work)

    def held(self, kind: str = "device") -> int:
        """Return the bytes allocated."""
        return sum(memory.nbytes for where, memory in self._memory.values() if where == kind)

    def check(self, kind: str, address: int, size: int) -> None:
        """Check that the range is in one allocation of this kind."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            start = self._starts[place]
            where, memory = self._memory[start]
            if where == kind and address + size <= start + memory.nbytes:
                return
        raise AssertionError(f"{size} bytes at {address:#x} are not in {kind} memory")

    def cudaSetDevice(self, number: int) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGetLastError(self) -> tuple[Status]:
        """Return the latest failure, stored until the next read."""
        kept, self.kept = self.kept, Status.cudaSuccess
        return (kept,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, int]:
        assert flags == self.cudaStreamNonBlocking
        self.living["stream"] += 1
        return Status.cudaSuccess, self.STREAM

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        return Status.cudaSuccess, self.total - self.held(), self.total

    def cudaMalloc(self, size: int) -> tuple[Status, int]:
        if self.captured is not None:
            return self._failed(Status.cudaErrorStreamCaptureUnsupported), 0
        if self.held() + size > self.total:
            return self._failed(Status.cudaErrorMemoryAllocation), 0
        return Status.cudaSuccess, self._allocate("device", size)

    def cudaMallocHost(self, size: int) -> tuple[Status, int]:
        return Status.cudaSuccess, self._allocate("pinned", size)

    def cudaStreamDestroy(self, stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        self._drain()
        self.living["stream"] -= 1
        return (Status.cudaSuccess,)

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        return self.cudaFree(address)

    def cudaEventCreate(self) -> tuple[Status, int]:
        self._moment += 1
        self.living["event"] += 1
        return Status.cudaSuccess, self._moment

    def cudaEventDestroy(self, event: int) -> tuple[Status]:
        self.moments.pop(event, None)
        self.living["event"] -= 1
        return (Status.cudaSuccess,)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        assert self.captured is None, "the graph would keep the moment of the capture, not those of its runs"
        self.put(partial(self._record, event))
        return (Status.cudaSuccess,)

    def cudaEventRecordWithFlags(self, event: int, stream: int, flags: int) -> tuple[Status]:
        assert (stream, flags) == (self.STREAM, self.cudaEventRecordExternal)
        assert self.captured is not None, "only a captured record may be external"
        self.put(partial(self._record, event))
        return (Status.cudaSuccess,)

    def cudaEventElapsedTime(self, start: int, end: int) -> tuple[Status, float]:
        waiting = {work.args[0] for work in self.queued if isinstance(work, partial)}
        assert not waiting & {start, end}, "the events are not recorded yet"
        return Status.cudaSuccess, (self.moments[end] - self.moments[start]) * 1e-6

    def cudaFree(self, address: int) -> tuple[Status]:
        assert self.captured is None, "memory is freed while work is captured"
        self._drain()
        del self._memory[address]
        self._starts.remove(address)
        return (Status.cudaSuccess,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        self.check("device", address, size)
        self.put(lambda: ctypes.memset(address, value, size))
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: str, stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        self.check("pinned" if kind == "from" else "device", target, size)
        self.check("pinned" if kind == "to" else "device", source, size)
        self.copies.append((kind, size))
        self.put(lambda: ctypes.memmove(target, source, size))
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        if self.captured is not None:
            return (self._failed(Status.cudaErrorStreamCaptureUnsupported),)
        self._drain()
        return (Status.cudaSuccess,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Status]:
        assert self.captured is None
        self.captured = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Status, list[Work] | None]:
        graph, self.captured = self.captured, None
        self.living["graph"] += 1
        return Status.cudaSuccess, graph

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Status, tuple[Work, ...]]:
        assert graph, "an empty graph was captured"
        self.living["executable graph"] += 1
        return Status.cudaSuccess, tuple(graph)

    def cudaGraphLaunch(self, graph: tuple[Work, ...], stream: int) -> tuple[Status]:
        assert stream == self.STREAM
        self.queued.extend(graph)
        self.launches += 1
        return (Status.cudaSuccess,)

    def cudaGraphDestroy(self, graph: Any) -> tuple[Status]:
        self.living["graph"] -= 1
        return (Status.cudaSuccess,)

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[Status]:
        self.living["executable graph"] -= 1
        return (Status.cudaSuccess,)

    def _failed(self, status: Status) -> Status:
        self.kept = status
        return status

    def _record(self, event: int) -> None:
        self.moments[event] = time.perf_counter_ns()

    def _allocate(self, kind: str, size: int) -> int:
        raw = np.full(size + ALIGNMENT, POISON, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        memory = raw[start : start + size]
        address = int(memory.ctypes.data)
        self._memory[address] = kind, memory
        insort(self._starts, address)
        return address

    def _drain(self) -> None:
        waiting, self.queued = self.queued, []
        for work in waiting:
            work()


class QueuedKernels:
    """redraft's kernels for the CPU, launched on the fake's stream."""

    def __init__(self, kernels: Any, cuda: FakeCuda) -> None:
        self._kernels = kernels
        self._cuda = cuda
        self.launched = 0

    def compact(self, args: Any, stream: int = 0) -> None:
        """Queue the kernel's launch."""
        assert stream == self._cuda.STREAM
        self.launched += 1
        self._cuda.put(lambda: self._kernels.compact(args))
