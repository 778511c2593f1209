"""Programs on TensorRT over CUDA memory: every tensor bound by its address, everything in order on one stream.

An engine is loaded once; each set of shapes has an execution context of its own, since a captured CUDA graph holds the
addresses and shapes of its context. Contexts of one engine share their scratch memory: they never run at once.

Attributes of TensorRT used here are in the Python bindings of 10.9 and of 11.x alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.engines.base import Array
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact, CompactProgram, can_compact
from redraft.engines.cuda import Cuda, Graph, Memory, open_cuda
from redraft.engines.device import (
    REMEMBERED_BYTES,
    Buffer,
    Program,
    Run,
    byte_size,
    check_bindings,
    check_part,
    check_values,
    check_whole,
    copied_bytes,
    numpy_type,
)
from redraft.engines.manifest import GraphRecord, rebuild_command
from redraft.engines.tensorrt.plugin import load_plugin
from redraft.engines.tensorrt.target import check_same, find_target, import_tensorrt
from redraft.errors import BackendError
from redraft.names import Dtype, TensorSpec
from redraft.plugins.library import find_kernels

_LOG = logging.getLogger("redraft.tensorrt")
_TYPES: Mapping[Dtype, str] = {
    "int64": "INT64", "int32": "INT32", "bool": "BOOL", "int8": "INT8", "uint8": "UINT8", "float32": "FLOAT",
    "float16": "HALF", "bfloat16": "BF16",
}  # fmt: skip
_UPDATING = frozenset({names.VERIFIER, names.LYANNA_DRAFT})
"""Engines that update KV buffers where they are. Of others, an output in place is written beside and copied."""
_MOVING = frozenset({names.STEP_MOVE, names.LYANNA_MOVE})
_MEBIBYTE = 1 << 20


def open_tensorrt_device(bundle: Bundle) -> TensorRtDevice:
    """The GPU with the bundle's engines. Raises BackendError for what is missing, or not what they were built for."""
    manifest = bundle.manifest
    built = manifest.tensorrt
    if built is None:
        raise bundle.error("expected TensorRT engines, found none")
    check_same(built, find_target(), rebuild_command(bundle.path, manifest.model.source))
    tensorrt, cuda = import_tensorrt(), open_cuda()
    if built.plugin_file:
        load_plugin(bundle.path / built.plugin_file, tensorrt)
    engines = {graph: bundle.path / engine.file for graph, engine in built.engines.items()}
    embedded = bool(built.plugin) and not built.plugin_file
    return TensorRtDevice(bundle, engines, cuda, tensorrt, find_kernels(), embedded)


class TensorRtDevice:
    """See `redraft.engines.device.Device`.

    engines: files by graph.   tensorrt: the Python package.   kernels: our kernels for the GPU, where they are built.
    embedded: the plugin's library is part of the engines, which TensorRT runs only where it is told that it may.
    """

    name = "cuda"

    def __init__(
        self, bundle: Bundle, engines: Mapping[str, Path], cuda: Cuda, tensorrt: Any, kernels: Compact | None = None,
        embedded: bool = False,
    ) -> None:  # fmt: skip
        self.cuda = cuda
        self.tensorrt = tensorrt
        self.failure = Failure(tensorrt)
        self._bundle = bundle
        self._files = engines
        self._kernels = kernels
        self._runtime = tensorrt.Runtime(self.failure.logger)
        if embedded:
            self._runtime.engine_host_code_allowed = True
        self._programs: dict[str, Program] = {}

    def empty(self, dtype: Dtype, *shape: int) -> CudaBuffer:
        """See `Device.empty`. Raises BackendError where the memory is used up."""
        size = byte_size(dtype, shape)
        memory = self.cuda.allocate(size)
        written = np.zeros(shape, numpy_type(dtype)) if size <= REMEMBERED_BYTES else None
        return CudaBuffer(dtype, shape, memory.address, self.cuda, memory, written)

    def expect(self, parts: Mapping[str, int]) -> None:
        """See `Device.expect`."""
        free, needed = self.cuda.free_bytes(), sum(parts.values())
        _LOG.info("GPU memory: %s; %s MiB free", _listed(parts), f"{free / _MEBIBYTE:.1f}")
        if needed > free:
            raise BackendError(
                f"{needed / _MEBIBYTE:.1f} MiB of GPU memory needed ({_listed(parts)}), {free / _MEBIBYTE:.1f} free",
                "lower the context or the slots, or free memory",
            )

    def copy(self, target: Buffer, source: Buffer) -> Run:
        """See `Device.copy`."""
        size = copied_bytes(target, source)
        return lambda: self.cuda.copy(target.address, source.address, size)

    def program(self, graph: str) -> Program:
        """See `Device.program`. Rows are moved without an engine; loading again gives the same program."""
        if graph not in self._programs:
            self._programs[graph] = self._load(graph, self._bundle.graph(graph))
        return self._programs[graph]

    def chain(self, runs: Sequence[Run]) -> Chain:
        """See `Device.chain`: a CUDA graph from the second run on, where all of `runs` can be captured."""
        flat: list[Run] = []
        for run in runs:
            flat += run.runs if isinstance(run, Chain) else [run]
        return Chain(self.cuda, tuple(flat))

    def _load(self, graph: str, record: GraphRecord) -> Program:
        if graph in _MOVING:
            return MoveProgram(record, self.cuda)
        if graph == names.STEP_KEEP and self._kernels is not None and can_compact(record):
            return CompactProgram(record, self, self._kernels, self.cuda.stream)
        if graph not in self._files:
            found = ", ".join(sorted(self._files)) or "none"
            kernels = "; our kernels do that as well: run `make plugins`" if graph == names.STEP_KEEP else ""
            raise self._bundle.error(f"expected an engine of {graph}, found {found}{kernels}")
        try:
            engine = self._runtime.deserialize_cuda_engine(self._files[graph].read_bytes())
        except OSError as error:
            raise self._bundle.error(f"the engine of {graph} cannot be read: {error}") from None
        if engine is None:
            raise self._bundle.error(f"TensorRT does not load the engine of {graph}: {self.failure.last}")
        if problem := next(_mismatches(self.tensorrt, engine, record), None):
            raise self._bundle.error(f"engine of {graph}: {problem}")
        return EngineProgram(self, graph, record, engine)


class Failure:
    """What TensorRT logs goes to Python's logging, and its last error is kept: calls only say that they failed."""

    def __init__(self, tensorrt: Any) -> None:
        self.last = "no reason given"
        levels = {tensorrt.ILogger.VERBOSE: logging.DEBUG, tensorrt.ILogger.INFO: logging.DEBUG,
                  tensorrt.ILogger.WARNING: logging.INFO}  # fmt: skip

        def log(logger: object, severity: Any, message: str) -> None:
            level = levels.get(severity, logging.WARNING)
            if level is logging.WARNING:
                self.last = " ".join(message.split())
            _LOG.log(level, "%s", message)

        def begin(logger: object) -> None:
            tensorrt.ILogger.__init__(logger)

        self.logger: Any = type("Logger", (tensorrt.ILogger,), {"__init__": begin, "log": log})()


@dataclass(frozen=True, eq=False)
class CudaBuffer:
    """See `redraft.engines.device.Buffer`. `memory` is held; `written` is what the host wrote last, of a small one."""

    dtype: Dtype
    shape: tuple[int, ...]
    address: int
    cuda: Cuda
    memory: Memory
    written: Array | None
    whole: bool = True

    def write(self, values: Array) -> None:
        """See `Buffer.write`."""
        check_whole(self.whole)
        check_values(self, values)
        if self.written is not None:
            self.written[...] = values
        self.cuda.write(self.address, np.ascontiguousarray(values))

    def read(self) -> Array:
        """See `Buffer.read`."""
        check_whole(self.whole)
        values = np.empty(self.shape, numpy_type(self.dtype))
        self.cuda.read(self.address, values)
        return values

    def part(self, *shape: int) -> Self:
        """See `Buffer.part`."""
        check_part(self, shape)
        return replace(self, shape=shape, whole=self.whole and shape == self.shape)


class EngineProgram:
    """An engine, see `redraft.engines.device.Program`."""

    def __init__(self, device: TensorRtDevice, graph: str, record: GraphRecord, engine: Any) -> None:
        self.inputs = record.inputs
        self.outputs = record.outputs
        self._device = device
        self._graph = graph
        self._engine = engine
        self._has = frozenset(engine.get_tensor_name(number) for number in range(engine.num_io_tensors))
        host = device.tensorrt.TensorLocation.HOST
        self._on_host = frozenset(name for name in self._has if engine.get_tensor_location(name) == host)
        self._scratch = device.cuda.allocate(engine.device_memory_size_v2)

    def bind(self, buffers: Mapping[str, Buffer]) -> EngineRun:
        """See `Program.bind`. Raises BackendError where no optimization profile takes the shapes."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        device, inputs = self._device, [spec for spec in self.inputs if spec.name in self._has]
        strategy = device.tensorrt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise BackendError(f"TensorRT makes no context of {self._graph}: {device.failure.last}")
        run = EngineRun(device, self._graph, context, not self._on_host, (self._scratch, dict(buffers)))
        run.must(context.set_optimization_profile_async(self._profile(inputs, buffers), device.cuda.stream))
        device.cuda.synchronize()
        context.set_device_memory(self._scratch.address, self._scratch.size)
        for spec in inputs:
            run.must(context.set_input_shape(spec.name, buffers[spec.name].shape))
            run.must(context.set_tensor_address(spec.name, self._input_address(spec, buffers[spec.name])))
        for spec in self.outputs:
            run.must(context.set_tensor_address(spec.name, self._output_address(spec, buffers[spec.name], run)))
        return run

    def _input_address(self, spec: TensorSpec, buffer: Buffer) -> int:
        """Where TensorRT reads an input: sizes, on the host, when work is put on the stream, so that none is stale."""
        if spec.name not in self._on_host:
            return buffer.address
        written = buffer.written if isinstance(buffer, CudaBuffer) else None
        if written is None or spec.name != names.LIVE:
            raise BackendError(f"the engine of {self._graph} wants {spec.name} on the host, which does not write it")
        return int(written.ctypes.data)

    def _output_address(self, spec: TensorSpec, buffer: Buffer, run: EngineRun) -> int:
        """Where TensorRT writes an output."""
        if spec.in_place_of is None or self._graph in _UPDATING:
            return buffer.address
        size = byte_size(buffer.dtype, buffer.shape)
        beside = self._device.cuda.allocate(size)
        run.copies.append((buffer.address, beside, size))
        return beside.address

    def _profile(self, inputs: Sequence[TensorSpec], buffers: Mapping[str, Buffer]) -> int:
        """The profile that holds all shapes: of the narrowest ones, that which is tuned for the nearest."""
        sizes = {
            spec.name: buffers[spec.name].shape for spec in inputs if not all(isinstance(d, int) for d in spec.shape)
        }
        widths: dict[int, tuple[int, int]] = {}
        for profile in range(self._engine.num_optimization_profiles):
            ranges = {name: self._engine.get_tensor_profile_shape(name, profile) for name in sizes}
            if all(_holds(ranges[name], shape) for name, shape in sizes.items()):
                width = sum(sum(tuple(most)) for _, _, most in ranges.values())
                widths[profile] = width, sum(_distance(ranges[name], shape) for name, shape in sizes.items())
        if not widths:
            raise BackendError(
                f"no optimization profile of {self._graph} takes {self._asked(inputs, buffers)}",
                "lower the budget's nodes or the slots, or build with larger --tree-nodes and --batch",
            )
        return min(widths, key=lambda profile: widths[profile])

    def _asked(self, inputs: Sequence[TensorSpec], buffers: Mapping[str, Buffer]) -> str:
        sizes = {
            dim: size
            for spec in inputs
            for dim, size in zip(spec.shape, buffers[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }
        return ", ".join(f"{dim}={size}" for dim, size in sizes.items())


class EngineRun:
    """An engine over fixed buffers. capturable: nothing that it reads on the host would be stale in a CUDA graph."""

    def __init__(self, device: TensorRtDevice, graph: str, context: Any, capturable: bool, keep: object) -> None:
        self.capturable = capturable
        self.copies: list[tuple[int, Memory, int]] = []
        self._device = device
        self._graph = graph
        self._context = context
        self._keep = keep

    def __call__(self) -> None:
        self.must(self._context.execute_async_v3(self._device.cuda.stream))
        for target, beside, size in self.copies:
            self._device.cuda.copy(target, beside.address, size)

    def must(self, worked: bool) -> None:
        """Raises BackendError where TensorRT says that it did not."""
        if not worked:
            raise BackendError(f"TensorRT refuses {self._graph}: {self._device.failure.last}")


class MoveProgram:
    """Slots copied by CUDA: the host, which chose them, says where from and where to."""

    def __init__(self, record: GraphRecord, cuda: Cuda) -> None:
        self.inputs = record.inputs
        self.outputs = record.outputs
        self._cuda = cuda

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """See `Program.bind`."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        ends = [buffers[name] for name in (names.SOURCE_SLOT, names.TARGET_SLOT)]
        state = [buffers[spec.in_place_of] for spec in self.outputs if spec.in_place_of]

        def run() -> None:
            source, target = (int(end.written[0]) for end in ends)  # type: ignore[attr-defined]
            for buffer in state:
                size = byte_size(buffer.dtype, buffer.shape[1:])
                self._cuda.copy(buffer.address + target * size, buffer.address + source * size, size)

        return run


class Chain:
    """Runs in order; see `TensorRtDevice.chain`. TensorRT must have run once before it can be captured."""

    _told = False

    def __init__(self, cuda: Cuda, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        self._cuda = cuda
        self._warm = False
        self._graph: Graph | None = None
        self._plain = not runs or not all(getattr(run, "capturable", False) for run in runs)

    def __call__(self) -> None:
        if self._graph is None and self._warm and not self._plain:
            self._capture()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._in_order()
        self._warm = True

    def _capture(self) -> None:
        try:
            self._graph = self._cuda.capture(self._in_order)
        except BackendError as error:
            self._plain = True
            if not Chain._told:
                Chain._told = True
                _LOG.warning("a step is not captured as a CUDA graph, which costs time: %s", error.message)

    def _in_order(self) -> None:
        for run in self.runs:
            run()


def _distance(profile: Sequence[Any], shape: tuple[int, ...]) -> int:
    """How far `shape` is from what a profile's range of a tensor is tuned for."""
    return sum(abs(tuned - size) for tuned, size in zip(tuple(profile[1]), shape, strict=True))


def _holds(profile: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether a profile's range (smallest, tuned for, largest) of a tensor holds `shape`."""
    least, _, most = (tuple(sizes) for sizes in profile)
    return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))


def _mismatches(tensorrt: Any, engine: Any, record: GraphRecord) -> Iterator[str]:
    """Differences between an engine's tensors and the manifest's, one line each. An input that nothing reads may be
    gone.
    """
    found = {engine.get_tensor_name(number) for number in range(engine.num_io_tensors)}
    for spec in (*record.inputs, *record.outputs):
        if spec.name not in found:
            if spec in record.outputs:
                yield f"expected tensor {spec.name}, found none"
            continue
        found.remove(spec.name)
        dtype = engine.get_tensor_dtype(spec.name)
        if dtype != getattr(tensorrt.DataType, _TYPES[spec.dtype]):
            yield f"expected {spec.name} {spec.dtype}, found {dtype}"
    for name in sorted(found):
        yield f"unexpected tensor {name}"


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {size / _MEBIBYTE:.1f} MiB" for part, size in parts.items())
