"""Buffers and work on CUDA's memory for all backends, in order on one stream.

From its second run on, a step that can be captured is one CUDA graph, including its copies from and to the host.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact, CompactProgram, can_compact
from redraft.engines.cuda import Cuda, Event, Graph, Memory, Pinned
from redraft.engines.device import (
    Array,
    Buffer,
    CapturedRun,
    Device,
    Program,
    Run,
    byte_size,
    check_part,
    check_values,
    copied_bytes,
    numpy_type,
)
from redraft.engines.manifest import GraphRecord
from redraft.errors import BackendError, RedraftError
from redraft.names import Dtype

_LOG = logging.getLogger("redraft.cuda")
_COPY_SLOT = f".{names.COPY_SLOT}"
_ALIGNMENT_BYTES = 256
"""Alignment in bytes of every address for TensorRT."""
_MEBIBYTE = 1 << 20


class CudaDevice(Device):
    """Buffers and work on CUDA. Subclasses load graphs. kernels: redraft's kernels for the GPU, if they are built."""

    name = "cuda"
    asynchronous = True
    step_graphs = True
    block_rows = None

    def __init__(self, bundle: Bundle, cuda: Cuda, kernels: Compact | None) -> None:
        self.cuda = cuda
        self._bundle = bundle
        self._kernels = kernels
        self._programs: dict[str, Program] = {}

    @abstractmethod
    def _load(self, graph: str, record: GraphRecord) -> Program:
        """Load a graph of the bundle. Raises BundleError."""

    @abstractmethod
    def _loaded_bytes(self, graph: str) -> int:
        """Return the device memory of a graph's weights."""

    def empty(self, dtype: Dtype, *shape: int) -> CudaBuffer:
        memory = Memory(self.cuda, byte_size(dtype, shape))
        return CudaBuffer(dtype, shape, memory.address, self.cuda, memory)

    def host_inputs(self, **shapes: tuple[int, ...]) -> PinnedInputs:
        return PinnedInputs(self.cuda, shapes)

    def host_outputs(self, buffer: Buffer) -> PinnedOutputs:
        return PinnedOutputs(self.cuda, buffer)

    def expect(self, parts: Mapping[str, int], graphs: Sequence[str] = ()) -> None:
        weights = sum(self._loaded_bytes(graph) for graph in graphs if graph not in self._programs)
        needs = {**({"engines": weights} if weights else {}), **parts}
        free, needed = self.cuda.free_bytes(), sum(needs.values())
        _LOG.info("GPU memory: %s; %s MiB free", _listed(needs), f"{free / _MEBIBYTE:.1f}")
        if needed > free:
            raise BackendError(
                f"{needed / _MEBIBYTE:.1f} MiB of GPU memory needed ({_listed(needs)}), {free / _MEBIBYTE:.1f} free",
                "lower max_model_len or max_num_seqs, or free memory",
            )

    def copy(self, target: Buffer, source: Buffer) -> CapturedRun:
        size = copied_bytes(target, source)
        run = partial(self.cuda.copy, target.address, source.address, size, "cudaMemcpyDeviceToDevice")
        return CapturedRun(run, (target, source))

    def program(self, graph: str, short: bool = False) -> Program:
        """Return a graph's program, the same one every time. Slots and rows move without an engine."""
        if graph not in self._programs:
            record = self._bundle.graph(graph)
            if graph.endswith(_COPY_SLOT):
                self._programs[graph] = MoveProgram(record, self.cuda)
            elif graph == names.STEP_COMPACT_KV and self._kernels is not None and can_compact(record):
                self._programs[graph] = CompactProgram(record, self, self._kernels, self.cuda.stream)
            else:
                self._programs[graph] = self._load(graph, record)
        return self._programs[graph]

    def chain(self, runs: Sequence[Run]) -> Chain:
        flat: list[Run] = []
        for run in runs:
            flat += run.runs if isinstance(run, Chain) else [run]
        return Chain(self.cuda, tuple(flat))

    def wait(self) -> None:
        self.cuda.synchronize()

    def close(self) -> None:
        self.cuda.synchronize()
        self._programs.clear()


@dataclass(frozen=True, eq=False)
class CudaBuffer:
    """A `redraft.engines.device.Buffer` on CUDA. It holds `memory`."""

    dtype: Dtype
    shape: tuple[int, ...]
    address: int
    cuda: Cuda
    memory: object
    host: Array | None = None

    def write(self, values: Array) -> None:
        check_values(self, values)
        self.cuda.write(self.address, np.ascontiguousarray(values))

    def read(self) -> Array:
        values = np.empty(self.shape, numpy_type(self.dtype))
        self.cuda.read(self.address, values)
        return values

    def part(self, *shape: int, start: int = 0) -> Self:
        check_part(self, shape, start)
        return replace(self, shape=shape, address=self.address + byte_size(self.dtype, (start,)))


class Send(CapturedRun):
    """The copy of host inputs. `at`: number of waits for the device before its latest run."""

    at = -1

    def __init__(self, cuda: Cuda, run: Run, keep: object) -> None:
        super().__init__(run, keep)
        self._cuda = cuda

    def __call__(self) -> None:
        super().__call__()
        self.at = self._cuda.waits


class PinnedInputs:
    """`redraft.engines.device.HostInputs` with one block of pinned memory and one of the device."""

    def __init__(self, cuda: Cuda, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._cuda = cuda
        places, size = {}, 0
        for name, shape in shapes.items():
            places[name] = size
            size += -(-byte_size("int64", shape) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory, pinned = held = Memory(cuda, size), Pinned(cuda, size)
        self._values: dict[str, Array] = {}
        self.buffers: dict[str, CudaBuffer] = {}
        for name, shape in shapes.items():
            start, count = places[name], math.prod(shape)
            values = pinned.bytes[start : start + 8 * count].view(np.int64).reshape(shape)
            values[...] = 0
            self._values[name] = values
            self.buffers[name] = CudaBuffer("int64", shape, memory.address + start, cuda, held, values)
        copy = partial(cuda.copy, memory.address, pinned.address, size, "cudaMemcpyHostToDevice")
        self.send = Send(cuda, copy, held)

    def open(self) -> Mapping[str, Array]:
        if self.send.at == self._cuda.waits:
            self._cuda.synchronize()
        return self._values


class PinnedOutputs:
    """`redraft.engines.device.HostOutputs` with pinned memory."""

    def __init__(self, cuda: Cuda, buffer: Buffer) -> None:
        size = byte_size(buffer.dtype, buffer.shape)
        pinned = Pinned(cuda, size)
        self.values: Array = pinned.bytes.view(numpy_type(buffer.dtype)).reshape(buffer.shape)
        copy = partial(cuda.copy, pinned.address, buffer.address, size, "cudaMemcpyDeviceToHost")
        self.fetch = CapturedRun(copy, (pinned, buffer))


class MoveProgram(Program):
    """Copies slots by CUDA. The host computes the slots' addresses, so slots must be fields of host inputs."""

    def __init__(self, record: GraphRecord, cuda: Cuda) -> None:
        super().__init__(record)
        self._cuda = cuda

    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        ends = [buffers[name].host for name in (names.SOURCE_SLOT, names.TARGET_SLOT)]
        state = [buffers[spec.in_place_of] for spec in self.outputs if spec.in_place_of]

        def run() -> None:
            source, target = (int(end[0]) for end in ends if end is not None)
            for buffer in state:
                size = byte_size(buffer.dtype, buffer.shape[1:])
                places = buffer.address + target * size, buffer.address + source * size
                self._cuda.copy(*places, size, "cudaMemcpyDeviceToDevice")

        return run


class Chain:
    """A `redraft.engines.device.Work`, captured at the second run: TensorRT must run once before a capture."""

    def __init__(self, cuda: Cuda, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        self._cuda = cuda
        self._began, self._ended = Event(cuda), Event(cuda)
        self._warm = False
        self._graph: Graph | None = None
        self._plain = not runs or not all(getattr(run, "capturable", False) for run in runs)
        self._sends = [run for run in runs if isinstance(run, Send)]

    def __call__(self) -> None:
        for send in self._sends:
            send.at = self._cuda.waits
        if self._graph is None and self._warm and not self._plain:
            self._capture()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._in_order()
        self._warm = True

    def seconds(self) -> float:
        return self._ended.seconds_since(self._began) if self._warm else 0.0

    def _capture(self) -> None:
        try:
            self._graph = self._cuda.capture(self._in_order)
        except RedraftError as error:
            self._plain = True
            if not self._cuda.warned:
                self._cuda.warned = True
                _LOG.warning("a step is not captured as a CUDA graph, which costs time: %s", error.message)

    def _in_order(self) -> None:
        self._began.record()
        for run in self.runs:
            run()
        self._ended.record()


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {size / _MEBIBYTE:.1f} MiB" for part, size in parts.items())
