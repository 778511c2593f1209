"""Stand-ins of CUDA and TensorRT whose work takes no time: what is left of a step over them is the host's.

They take the place of the modules `cuda.bindings.runtime` and `tensorrt`. Memory of the device is numbers that nobody
reads; nothing is computed. Only verdicts must make sense, so that text goes on: `Script` says them.
"""

from __future__ import annotations

import ctypes
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.cuda import Cuda
from redraft.engines.device import Array
from redraft.engines.manifest import GraphRecord
from redraft.engines.tensorrt_device import TensorRtDevice

STREAM = 1
TOTAL_BYTES = 1 << 37
_ALIGNMENT = 256
ACCEPTED = (0, 0, 1, 1, 2, 3)
"""Drafted tokens that a step keeps, each as often as the next, as far as its tree may reach."""


class Script:
    """What the verifier says, one sequence at a time: the tokens of a text, more or fewer of them a step."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._text: Sequence[int] = (0,)
        self._at = 0

    def begin(self, text: Sequence[int], at: int) -> None:
        """Say the text's tokens from `at` on, and those from its beginning after its last."""
        self._text, self._at = text, at

    def say(self, verdict: Array) -> None:
        """Write the verdict int64[1 + 2 T] of a tree that was padded to T nodes, so has more than the next width."""
        width = (len(verdict) - 1) // 2
        narrower = names.TREE_WIDTHS[bisect_left(names.TREE_WIDTHS, width) - 1] if width > 1 else 0
        kept = min(self._random.choice(ACCEPTED), narrower)
        verdict[0] = 1 + kept
        for node in range(kept + 1):
            verdict[1 + node] = node
            verdict[1 + width + node] = self._text[(self._at + node) % len(self._text)]
        self._at += kept + 1


class Status(IntEnum):
    """Of cudaError_t, all there is."""

    cudaSuccess = 0


_DONE = (Status.cudaSuccess,)


class IdleCuda:
    """A CUDA runtime.

    launched: when graphs were put on the stream, seconds of `time.perf_counter`.   waited: seconds spent in waits.
    """

    cudaError_t = Status
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaStreamNonBlocking = 1
    cudaEventRecordExternal = 1

    def __init__(self, script: Script) -> None:
        self.script = script
        self.launched: list[float] = []
        self.waited = 0.0
        self._next = _ALIGNMENT
        self._pinned: dict[int, Array] = {}
        self._fetched: list[Array] = []
        self._waiting: list[Array] = []
        self._capturing = False

    def __getattr__(self, name: str) -> Any:
        """What gives nothing but its status."""
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return _succeed

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, int]:
        return Status.cudaSuccess, STREAM

    def cudaEventCreate(self) -> tuple[Status, int]:
        return Status.cudaSuccess, 0

    def cudaEventElapsedTime(self, start: int, end: int) -> tuple[Status, float]:
        return Status.cudaSuccess, 0.0

    def cudaMemGetInfo(self) -> tuple[Status, int, int]:
        return Status.cudaSuccess, TOTAL_BYTES, TOTAL_BYTES

    def cudaMalloc(self, size: int) -> tuple[Status, int]:
        address = self._next
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT
        return Status.cudaSuccess, address

    def cudaMallocHost(self, size: int) -> tuple[Status, int]:
        memory = np.zeros(size, np.uint8)
        address = int(memory.ctypes.data)
        self._pinned[address] = memory
        return Status.cudaSuccess, address

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        del self._pinned[address]
        return _DONE

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> tuple[Status]:
        if kind == self.cudaMemcpyKind.cudaMemcpyDeviceToHost and not self._holds(target, size):
            ctypes.memset(target, 0, size)  # a tree that is read: children of the root
        elif kind == self.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            values = np.ctypeslib.as_array((ctypes.c_int64 * (size // 8)).from_address(target))
            (self._fetched if self._capturing else self._waiting).append(values)
        return _DONE

    def _holds(self, target: int, size: int) -> bool:
        """True for memory of just this size: an outbox, which only verdicts are fetched to."""
        memory = self._pinned.get(target)
        return memory is not None and len(memory) == size

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Status]:
        self._capturing, self._fetched = True, []
        return _DONE

    def cudaStreamEndCapture(self, stream: int) -> tuple[Status, list[Array]]:
        self._capturing = False
        return Status.cudaSuccess, self._fetched

    def cudaGraphInstantiate(self, graph: list[Array], flags: int) -> tuple[Status, list[Array]]:
        return Status.cudaSuccess, graph

    def cudaGraphLaunch(self, graph: list[Array], stream: int) -> tuple[Status]:
        self._waiting += graph
        self.launched.append(time.perf_counter())
        return _DONE

    def cudaStreamSynchronize(self, stream: int) -> tuple[Status]:
        began = time.perf_counter()
        for verdict in self._waiting:
            self.script.say(verdict)
        self._waiting.clear()
        self.waited += time.perf_counter() - began
        return _DONE


def _succeed(*arguments: Any) -> tuple[Status]:
    return _DONE


class IdleTensorRt:
    """A TensorRT; the bytes of an engine are its graph's name."""

    class ILogger:
        VERBOSE, INFO, WARNING = "verbose", "info", "warning"

    TensorLocation = Enum("TensorLocation", ["DEVICE", "HOST"])
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=0)

    class DataType:
        INT64, INT32, BOOL, INT8, UINT8 = "int64", "int32", "bool", "int8", "uint8"
        FLOAT, HALF, BF16 = "float32", "float16", "bfloat16"

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def Runtime(self, logger: object) -> IdleTensorRt:
        return self

    def deserialize_cuda_engine(self, data: bytes) -> IdleEngine:
        return IdleEngine(self._bundle.graph(memoryview(data).tobytes().decode()))


class IdleEngine:
    """An ICudaEngine and its IExecutionContext, which takes everything."""

    device_memory_size_v2 = 0
    num_optimization_profiles = 1

    def __init__(self, record: GraphRecord) -> None:
        self._dtypes = {spec.name: spec.dtype for spec in (*record.inputs, *record.outputs)}
        self._names = list(self._dtypes)
        self._ranks = {spec.name: len(spec.shape) for spec in record.inputs}
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, number: int) -> str:
        return self._names[number]

    def get_tensor_location(self, name: str) -> Any:
        return IdleTensorRt.TensorLocation["DEVICE"]

    def get_tensor_dtype(self, name: str) -> str:
        return self._dtypes[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        rank = self._ranks[name]
        return [[0] * rank, [1] * rank, [1 << 30] * rank]

    def create_execution_context(self, strategy: int) -> IdleEngine:
        return self

    def set_device_memory(self, address: int, size: int) -> None: ...

    def set_optimization_profile_async(self, *arguments: Any) -> bool:
        return True

    set_input_shape = set_tensor_address = execute_async_v3 = set_optimization_profile_async


def idle_device(bundle: Bundle, folder: Path, script: Script) -> tuple[TensorRtDevice, IdleCuda]:
    """The device path over stand-ins, with an engine for every graph of the bundle. `folder` is written to."""
    engines = {graph: folder / graph for graph in bundle.manifest.all_graphs}
    for graph, path in engines.items():
        path.write_text(graph)
    cuda = IdleCuda(script)
    return TensorRtDevice(bundle, engines, Cuda(cuda), IdleTensorRt(bundle)), cuda
