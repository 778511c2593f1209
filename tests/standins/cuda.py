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
from inspect import ismethod
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

    def __getattribute__(self, name: str) -> Any:
        """Let CUDA's functions answer like cuda-python's, by a status and the result."""
        found = super().__getattribute__(name)
        return partial(self._answer, found) if name.startswith("cuda") and ismethod(found) else found

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        found = function(*arguments)
        if isinstance(found, tuple):
            return found
        if not isinstance(found, Status):
            return Status.cudaSuccess, found
        self.kept = found
        return found, None

    def put(self, work: Work, stream: int = STREAM) -> None:
        """Queue work, or add it to the graph that is being captured."""
        assert stream == self.STREAM
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

    def cudaSetDevice(self, number: int) -> None: ...

    def cudaGetLastError(self) -> tuple[Status]:
        """Return the latest failure, stored until the next read."""
        kept, self.kept = self.kept, Status.cudaSuccess
        return (kept,)

    def cudaStreamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.cudaStreamNonBlocking
        self.living["stream"] += 1
        return self.STREAM

    def cudaStreamDestroy(self, stream: int) -> None:
        self._drain()
        self.living["stream"] -= 1

    def cudaStreamSynchronize(self, stream: int) -> Status | None:
        if self.captured is not None:
            return Status.cudaErrorStreamCaptureUnsupported
        return self._drain()

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        return Status.cudaSuccess, self.total - self.held(), self.total

    def cudaMalloc(self, size: int) -> Status | int:
        if self.captured is not None:
            return Status.cudaErrorStreamCaptureUnsupported
        if self.held() + size > self.total:
            return Status.cudaErrorMemoryAllocation
        return self._allocate("device", size)

    def cudaMallocHost(self, size: int) -> int:
        return self._allocate("pinned", size)

    def cudaFree(self, address: int) -> None:
        assert self.captured is None, "memory is freed while work is captured"
        self._drain()
        del self._memory[address]
        self._starts.remove(address)

    cudaFreeHost = cudaFree

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self.check("device", address, size)
        self.put(lambda: ctypes.memset(address, value, size), stream)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: str, stream: int) -> None:
        self.check("pinned" if kind == "from" else "device", target, size)
        self.check("pinned" if kind == "to" else "device", source, size)
        self.copies.append((kind, size))
        self.put(lambda: ctypes.memmove(target, source, size), stream)

    def cudaEventCreate(self) -> int:
        self._moment += 1
        self.living["event"] += 1
        return self._moment

    def cudaEventDestroy(self, event: int) -> None:
        self.moments.pop(event, None)
        self.living["event"] -= 1

    def cudaEventRecord(self, event: int, stream: int) -> None:
        assert self.captured is None, "the graph would keep the moment of the capture, not those of its runs"
        self.put(partial(self._record, event), stream)

    def cudaEventRecordWithFlags(self, event: int, stream: int, flags: int) -> None:
        assert flags == self.cudaEventRecordExternal
        assert self.captured is not None, "only a captured record may be external"
        self.put(partial(self._record, event), stream)

    def cudaEventElapsedTime(self, start: int, end: int) -> float:
        waiting = {work.args[0] for work in self.queued if isinstance(work, partial)}
        assert not waiting & {start, end}, "the events are not recorded yet"
        return (self.moments[end] - self.moments[start]) * 1e-6

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert self.captured is None
        self.captured = []

    def cudaStreamEndCapture(self, stream: int) -> list[Work] | None:
        graph, self.captured = self.captured, None
        self.living["graph"] += 1
        return graph

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> list[Work]:
        assert graph, "an empty graph was captured"
        self.living["executable graph"] += 1
        return graph

    def cudaGraphLaunch(self, graph: list[Work], stream: int) -> None:
        assert stream == self.STREAM
        self.queued.extend(graph)
        self.launches += 1

    def cudaGraphDestroy(self, graph: Any) -> None:
        self.living["graph"] -= 1

    def cudaGraphExecDestroy(self, graph: Any) -> None:
        self.living["executable graph"] -= 1

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
        self.launched += 1
        self._cuda.put(lambda: self._kernels.compact(args), stream)
