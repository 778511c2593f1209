"""The host as a device: buffers are arrays, and a call returns after its work."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.cpus import default_threads
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact, CompactProgram, can_compact
from redraft.engines.device import (
    Array,
    Buffer,
    Device,
    Program,
    Run,
    check_part,
    check_values,
    copied_bytes,
    numpy_type,
)
from redraft.engines.manifest import GraphRecord
from redraft.names import Dtype
from redraft.plugins.operators import find_operators

MOST_COPIED_BYTES = 64 << 20
"""Weights that an engine for chains and one for trees may both hold. Each engine rearranges weights for its kernels, so
they cannot share them. With more, the engine for trees does both: it is up to 5 % slower for chains, in small models.
"""
BLOCK_ROWS = 128
"""Rows that the CPU's products sum at a time, or a multiple of that (`redraft.engines.lowering.order`)."""


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """A `redraft.engines.device.Buffer` of the host. `host` is the whole array."""

    dtype: Dtype
    shape: tuple[int, ...]
    host: Array

    @classmethod
    def zeros(cls, dtype: Dtype, *shape: int) -> Self:
        """Allocate a buffer of zeros."""
        return cls(dtype, shape, np.zeros(shape, numpy_type(dtype)))

    @classmethod
    def of(cls, dtype: Dtype, array: Array) -> Self:
        """Return a buffer over the memory of a C-contiguous array."""
        return cls(dtype, array.shape, array)

    @cached_property
    def address(self) -> int:
        return int(self.host.ctypes.data)

    def write(self, values: Array) -> None:
        check_values(self, values)
        self.host[...] = values

    def read(self) -> Array:
        return self.host.copy()

    def part(self, *shape: int, start: int = 0) -> Self:
        check_part(self, shape, start)
        elements = self.host.reshape(-1)[start : start + math.prod(shape)]
        return type(self)(self.dtype, shape, elements.reshape(shape))


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Array:
    """Return an array of zeros whose address is a multiple of `alignment` bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def array_of(buffer: Buffer) -> Array:
    """Return the elements of a buffer of the host."""
    assert buffer.host is not None
    return buffer.host


class ArrayInputs:
    """`redraft.engines.device.HostInputs` of the host, which needs no copy: `send` does nothing."""

    def __init__(self, buffers: Mapping[str, HostBuffer]) -> None:
        self.buffers = buffers
        self._values = {name: buffer.host for name, buffer in buffers.items()}

    def open(self) -> Mapping[str, Array]:
        return self._values

    def send(self) -> None: ...


class ArrayOutputs:
    """`redraft.engines.device.HostOutputs` of the host."""

    def __init__(self, source: Array) -> None:
        self._source = source
        self.values = np.empty_like(source)

    def fetch(self) -> None:
        self.values[...] = self._source


class HostDevice(Device):
    """Runs graphs lowered to CPU kernels.

    max_num_seqs, exact: these choose the verifier's graph (`Bundle.host_graph`).   verifier_graph: another one.
    step_graphs:  run the step's graphs like a GPU; otherwise NumPy functions replace them.
    kernels:      redraft's kernels built for the CPU, for tests; None uses only graphs.
    """

    asynchronous = False

    def __init__(  # noqa: PLR0913 - facts of a bundle and options of a process
        self, bundle: Bundle, threads: int | None = None, kernels: Compact | None = None, *, step_graphs: bool = True,
        max_num_seqs: int | None = None, exact: bool = True, verifier_graph: str = "",
    ) -> None:  # fmt: skip
        self.name = "cpu" if step_graphs else "host"
        self.step_graphs = step_graphs
        self.bundle = bundle
        self.host_threads = threads or default_threads().count
        self._threads = threads
        self._kernels = kernels
        self._single = max_num_seqs == 1
        chains = self._single and not (exact and bundle.manifest.drafters and not self.copies_weights)
        self.verifier_graph = verifier_graph or bundle.host_graph(chains, exact, find_operators() is not None)
        exact_graphs = (names.VERIFIER_BATCH, names.VERIFIER_SINGLE)
        self.block_rows = BLOCK_ROWS if self.verifier_graph in exact_graphs else None
        self.own_attention = self.verifier_graph == names.VERIFIER_OPERATORS

    @property
    def copies_weights(self) -> bool:
        """True if an engine for chains and one for trees may be open together."""
        if names.VERIFIER_BATCH not in self.bundle.manifest.graphs:
            return True
        return self.bundle.graph_bytes(names.VERIFIER_BATCH) <= MOST_COPIED_BYTES

    def empty(self, dtype: Dtype, *shape: int) -> HostBuffer:
        return HostBuffer.zeros(dtype, *shape)

    def host_inputs(self, **shapes: tuple[int, ...]) -> ArrayInputs:
        return ArrayInputs({name: self.empty("int64", *shape) for name, shape in shapes.items()})

    def host_outputs(self, buffer: Buffer) -> ArrayOutputs:
        return ArrayOutputs(array_of(buffer))

    def expect(self, parts: Mapping[str, int], graphs: Sequence[str] = ()) -> None:
        """Accept everything: the host's free memory is unknown, since memory may be swapped."""

    def copy(self, target: Buffer, source: Buffer) -> Run:
        size = copied_bytes(target, source)

        def run() -> None:
            ctypes.memmove(target.address, source.address, size)

        return run

    def program(self, graph: str, short: bool = False) -> Program:
        """Load a graph of the bundle, or the NumPy function that replaces it. Raises BundleError."""
        from redraft.engines.onnxruntime_device import load_program

        record = self.bundle.graph(graph)
        if not self.step_graphs and graph == names.STEP_GATHER_FEATURES:
            return GatherFeatures(record)
        if graph == names.STEP_COMPACT_KV and self._kernels is not None and can_compact(record):
            return CompactProgram(record, self, self._kernels)
        if graph == names.VERIFIER:
            program = load_program(self.bundle, self.verifier_graph, self._threads)
            packed = any(spec.name == names.PACKED_ROWS for spec in program.inputs)
            return PaddedVerifier(program, record) if packed and self.step_graphs else program
        return load_program(self.bundle, self.form(graph), 1 if short else self._threads)

    def form(self, graph: str) -> str:
        own = [names.operators(graph)] if find_operators() is not None else []
        lowered = own + ([names.single(graph)] if self._single else []) + [names.batch(graph)]
        return next((name for name in lowered if name in self.bundle.manifest.all_graphs), graph)

    def chain(self, runs: Sequence[Run]) -> InOrder:
        return InOrder(tuple(runs))

    def wait(self) -> None: ...

    def close(self) -> None: ...


class InOrder:
    """Runs in order; a `redraft.engines.device.Work`."""

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self._runs = runs
        self._seconds = 0.0

    def __call__(self) -> None:
        started = time.perf_counter()
        for run in self._runs:
            run()
        self._seconds = time.perf_counter() - started

    def seconds(self) -> float:
        return self._seconds


class GatherFeatures(Program):
    """`step.gather_features` in NumPy: row path[b, i] of features[b] goes to row offset[b] + i of pending[b]."""

    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        inputs = (names.FEATURE_ROWS, names.PATH, names.PENDING_FEATURES, names.PENDING_OFFSET)
        features, paths, pending, offsets = (array_of(buffers[name]) for name in inputs)

        def run() -> None:
            for slot, (path, start) in enumerate(zip(paths, offsets.tolist(), strict=True)):
                pending[slot, start : start + len(path)] = features[slot, path]

        return run


class PaddedVerifier(Program):
    """The verifier's packed graph over B trees of T rows each, N = B * T in all, as the graphs of a step have them."""

    def __init__(self, packed: Program, record: GraphRecord) -> None:
        """record: that of the portable graph."""
        super().__init__(record)
        self._packed = packed

    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        wanted = array_of(buffers[names.OUTPUT_ROWS])  # [B, R]
        sequences, width = buffers[names.TOKEN_IDS].shape
        rows = np.zeros((1, wanted.size), np.int64)
        starts = width * np.arange(sequences)[:, None]
        shapes = {spec.name: spec.shape for spec in (*self._packed.inputs, *self._packed.outputs)}
        given = dict(buffers)
        for spec in (*self.inputs, *self.outputs):
            if spec.shape != shapes[spec.name]:  # [B, T, …] -> [1, B * T, …], in the same memory
                first, second, *others = buffers[spec.name].shape
                given[spec.name] = buffers[spec.name].part(1, first * second, *others)
        given[names.OUTPUT_ROWS] = HostBuffer.of("int64", rows)
        given[names.PACKED_ROWS] = HostBuffer.of("int64", np.arange(sequences * width))
        run = self._packed.bind(given)

        def run_packed() -> None:
            np.add(wanted, starts, out=rows.reshape(wanted.shape))
            run()

        return run_packed
