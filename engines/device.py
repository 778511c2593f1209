"""Graphs over buffers of a device's or the host's memory, so that a step's tensors stay there between graphs.

Every tensor is a `Buffer`. Each input and output is bound by name, and one program's output is the next one's input
without a copy. The backends are ONNX Runtime (CPU and CUDA) and TensorRT, with one device path in the runtime for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from redraft.engines.manifest import GraphRecord
from redraft.names import Dim, Dtype, TensorSpec

Array = NDArray[Any]
Run = Callable[[], None]
"""Work that starts after all earlier work. It may still run when the function returns."""


class Buffer(Protocol):
    """Memory of one element type and shape, C-contiguous, at a fixed address."""

    @property
    def dtype(self) -> Dtype:
        """Element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def address(self) -> int:
        """Address of the first byte in the device's memory."""

    @property
    def host(self) -> Array | None:
        """The array that the host reads and writes: the buffer on the host, host inputs on a GPU, otherwise None."""

    def write(self, values: Array) -> None:
        """Copy from the host, after all earlier work. The array may be reused at once."""

    def read(self) -> Array:
        """Wait for the device, and return a copy of the buffer on the host."""

    def part(self, *shape: int, start: int = 0) -> Self:
        """Return the elements from `start` on under another shape, which shares the memory.

        Raises ValueError if the shape has more elements.
        """


class HostInputs(Protocol):
    """Integers that the host sends to programs for every step, all with one copy."""

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The buffers that programs read, by name."""

    @property
    def send(self) -> Run:
        """Return a run that copies the filled arrays to `buffers`."""

    def open(self) -> Mapping[str, Array]:
        """Return the arrays to fill by name, int64 each. They keep their earlier values.

        Waits for the device unless the host waited since the last `send`, whose copy may still run.
        """


class HostOutputs(Protocol):
    """A copy of a buffer on the host, read after every step."""

    @property
    def fetch(self) -> Run:
        """Return a run that copies the buffer to `values`."""

    @property
    def values(self) -> Array:
        """The buffer's elements, valid after a wait for the device. The next `fetch` overwrites them."""


class Work(Protocol):
    """Several runs, in order, as one."""

    def __call__(self) -> None:
        """Start the runs."""

    def seconds(self) -> float:
        """Return the device's time for the latest run, after a wait for the device; 0 before the first run."""


class Program(ABC):
    """A graph of a bundle, loaded. Its inputs and outputs are in the manifest's order."""

    def __init__(self, record: GraphRecord) -> None:
        self.inputs = record.inputs
        self.outputs = record.outputs

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """Return a run over these buffers, one for every input and output. In-place outputs share their input's buffer.

        Raises ValueError on a missing or unknown name, or a type or shape that does not fit.
        """
        check_bindings((*self.inputs, *self.outputs), buffers)
        return self._bind(buffers)

    @abstractmethod
    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """Return a run over buffers that fit."""


class CapturedRun:
    """A run that a CUDA graph may contain: the host reads nothing that changes. `keep` holds the run's memory."""

    capturable = True

    def __init__(self, run: Run, keep: object) -> None:
        self._run = run
        self._keep = keep

    def __call__(self) -> None:
        self._run()


class Device(ABC):
    """Memory and loaded programs of one bundle.

    name:         the user's name for the device: `cpu`, `cuda` …
    asynchronous: True if a call may return before its work ends.
    step_graphs:  True if the graphs of a step run on this device. Otherwise the host computes over its arrays.
    block_rows:   a tree that branches must not cross a multiple of this row; otherwise its bits differ from a chain's.
    own_attention: True if redraft's attention for CPUs runs: exact and the fastest at once, without padding.
    host_threads: threads of graphs on the host; 1 on a GPU.
    """

    name: str
    asynchronous: bool
    step_graphs: bool
    block_rows: int | None
    own_attention = False
    host_threads = 1

    def form(self, graph: str) -> str:
        """Return the form of a drafter's graph that the device runs: a graph of the bundle."""
        return graph

    @abstractmethod
    def empty(self, dtype: Dtype, *shape: int) -> Buffer:
        """Return a buffer of zeros. Raises BackendError if memory is full."""

    @abstractmethod
    def host_inputs(self, **shapes: tuple[int, ...]) -> HostInputs:
        """Return host inputs of int64 fields of these shapes, zeros."""

    @abstractmethod
    def host_outputs(self, buffer: Buffer) -> HostOutputs:
        """Return host outputs of all of `buffer`."""

    @abstractmethod
    def expect(self, parts: Mapping[str, int], graphs: Sequence[str] = ()) -> None:
        """Check that buffers of these bytes, by purpose, and these graphs fit together before they are loaded.

        Raises BackendError if they do not fit together.
        """

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer) -> Run:
        """Return a run that copies `source` to `target` within the device. Raises ValueError if their sizes differ."""

    @abstractmethod
    def program(self, graph: str, short: bool = False) -> Program:
        """Load a graph of the bundle. `short` graphs are too short for several threads.

        Raises BundleError, and BackendError if the graph does not fit or run on this device.
        """

    @abstractmethod
    def chain(self, runs: Sequence[Run]) -> Work:
        """Return work that runs all of `runs` in order, as one CUDA graph if the backend can capture it."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all earlier work has finished. Raises BackendError if it failed."""

    @abstractmethod
    def close(self) -> None:
        """Drop all programs after they finish. Their memory is freed with the last reference."""


def numpy_type(dtype: Dtype) -> np.dtype[Any]:
    """Return NumPy's type of the same bytes. bfloat16, which it lacks, becomes its bits."""
    return np.dtype(np.uint16) if dtype == "bfloat16" else np.dtype(dtype)


def byte_size(dtype: Dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * numpy_type(dtype).itemsize


def sized(shape: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with the symbols' sizes."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)


def check_values(buffer: Buffer, values: Array) -> None:
    """Raise ValueError if `values` do not have the type and size of `buffer`."""
    if values.shape != buffer.shape or values.dtype != numpy_type(buffer.dtype):
        raise ValueError(f"expected {buffer.dtype}{list(buffer.shape)}, found {values.dtype}{list(values.shape)}")


def check_part(buffer: Buffer, shape: tuple[int, ...], start: int) -> None:
    """Raise ValueError if `shape`, from element `start` on, has more elements than `buffer`."""
    if start < 0 or start + math.prod(shape) > math.prod(buffer.shape):
        after = f" after {start} elements" if start else ""
        raise ValueError(f"expected at most the buffer's {list(buffer.shape)}, found {list(shape)}{after}")


def slots_of(buffer: Buffer, slots: range) -> Buffer:
    """Return the entries of these slots, along axis 0."""
    return buffer.part(len(slots), *buffer.shape[1:], start=slots.start * math.prod(buffer.shape[1:]))


def copied_bytes(target: Buffer, source: Buffer) -> int:
    """Return the bytes that a copy moves. Raises ValueError if the buffers' sizes differ."""
    sizes = [byte_size(buffer.dtype, buffer.shape) for buffer in (target, source)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"expected buffers of the same size, found {sizes[0]} and {sizes[1]} bytes")
    return sizes[0]


def check_bindings(specs: Sequence[TensorSpec], buffers: Mapping[str, Buffer]) -> None:
    """Raise ValueError if the buffers do not fit the tensors, or two sizes of one symbol differ."""
    names = {spec.name for spec in specs}
    if set(buffers) != names:
        wrong = sorted(set(buffers) ^ names)
        raise ValueError(f"expected buffers for exactly the inputs and outputs; missing or unknown: {', '.join(wrong)}")
    sizes: dict[str, int] = {}
    for spec in specs:
        buffer = buffers[spec.name]
        fits = len(buffer.shape) == len(spec.shape) and buffer.dtype == spec.dtype
        for dim, found in zip(spec.shape, buffer.shape, strict=False):
            fits = fits and found == (sizes.setdefault(dim, found) if isinstance(dim, str) else dim)
        if not fits:
            raise ValueError(
                f"{spec.name}: expected {spec.dtype}{list(spec.shape)} with {sizes}, found {buffer.dtype}"
                f"{list(buffer.shape)}"
            )
        if spec.in_place_of is not None and buffer.address != buffers[spec.in_place_of].address:
            raise ValueError(f"{spec.name}: expected the buffer of {spec.in_place_of}")
