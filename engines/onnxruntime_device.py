"""Programs on ONNX Runtime over buffers of one device: `cpu`, or `cuda` with the build for it.

Every tensor is bound by its address, so that nothing is copied between programs. On CUDA the logits never leave the
device; on the CPU the same code runs over host memory, which is how it is tested.

On CUDA a run waits for its end (`disable_synchronize_execution_providers` stays off), because writing does not: it goes
by the default stream, which does not wait for the provider's, and comes back when the copy is done. An input that the
session reads on the host is bound to host memory: bound elsewhere, it would be copied once, when it is bound.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import onnxruntime as ort

from redraft import names
from redraft.engines.base import Array
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact, CompactProgram, can_compact
from redraft.engines.cuda import open_cuda
from redraft.engines.device import (
    REMEMBERED_BYTES,
    Buffer,
    Program,
    Run,
    check_bindings,
    check_part,
    check_values,
    check_whole,
    copied_bytes,
    numpy_type,
)
from redraft.engines.onnxruntime_backend import load_session
from redraft.errors import BackendError
from redraft.names import Dtype, TensorSpec

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
OPTIONS: Mapping[str, Mapping[str, str]] = {"CUDAExecutionProvider": {"arena_extend_strategy": "kSameAsRequested"}}
"""Options of a provider: by default CUDA's memory grows by powers of two, up to twice what weights and KV need."""
_LOG = logging.getLogger("redraft.onnxruntime")
_BFLOAT16 = 16
"""ONNX's number of the type, which NumPy lacks."""
_SIZES = frozenset({
    "Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Mul", "Range",
    "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
})  # fmt: skip
"""What ONNX Runtime computes on the host on purpose, where it makes the sizes of tensors."""


class OnnxRuntimeDevice:
    """See `redraft.engines.device.Device`. Raises BackendError where this ONNX Runtime has no such device.

    kernels: ours for the same memory, ready when a launch returns; None leaves everything to graphs.
    """

    def __init__(
        self, bundle: Bundle, name: str = "cpu", threads: int | None = None, kernels: Compact | None = None
    ) -> None:
        available = ort.get_available_providers()
        if PROVIDERS[name] not in available:
            raise BackendError(
                f"this ONNX Runtime runs on {', '.join(available)}, not on {PROVIDERS[name]}",
                "install onnxruntime-gpu in place of onnxruntime",
            )
        self.name = name
        self._bundle = bundle
        self._threads = threads
        self._kernels = kernels

    def empty(self, dtype: Dtype, *shape: int) -> OnnxRuntimeBuffer:
        """See `Device.empty`."""
        zeros = np.zeros(math.prod(shape), numpy_type(dtype))
        held = ort.OrtValue.ortvalue_from_numpy(zeros, self.name, 0)
        return OnnxRuntimeBuffer(
            dtype, shape, held.data_ptr(), held, zeros if zeros.nbytes <= REMEMBERED_BYTES else None
        )

    def expect(self, parts: Mapping[str, int]) -> None:
        """See `Device.expect`: ONNX Runtime does not say what is free."""

    def copy(self, target: Buffer, source: Buffer) -> Run:
        """See `Device.copy`. On CUDA it is done when the run returns, and raises BackendError without cuda-python."""
        size = copied_bytes(target, source)
        cuda = open_cuda() if self.name != "cpu" else None

        def run() -> None:
            if cuda is None:
                ctypes.memmove(target.address, source.address, size)
            else:
                cuda.copy(target.address, source.address, size)
                cuda.synchronize()

        return run

    def program(self, graph: str) -> Program:
        """See `Device.program`. Raises BundleError."""
        record, provider = self._bundle.graph(graph), PROVIDERS[self.name]
        if graph == names.STEP_KEEP and self._kernels is not None and can_compact(record):
            return CompactProgram(record, self, self._kernels)
        session = load_session(self._bundle, graph, self._threads, (provider, OPTIONS.get(provider, {})))
        on_host = host_inputs(session) if provider != PROVIDERS["cpu"] else frozenset()
        if provider != PROVIDERS["cpu"]:
            if wrong := sorted(on_host - {names.LIVE}):
                raise self._bundle.error(f"graph {graph}: {provider} leaves what reads {', '.join(wrong)} to the CPU")
            if left := left_to_cpu(session.get_provider_graph_assignment_info()):
                _LOG.warning("graph %s: %s leaves nodes to the CPU, which costs time: %s", graph, provider, left)
        return OnnxRuntimeProgram(session, self.name, record.inputs, record.outputs, on_host)

    def chain(self, runs: Sequence[Run]) -> Run:
        """See `Device.chain`: one after the other, as a graph whose sizes follow its inputs cannot be captured."""
        kept = tuple(runs)

        def run() -> None:
            for each in kept:
                each()

        return run


@dataclass(frozen=True)
class OnnxRuntimeBuffer:
    """See `redraft.engines.device.Buffer`. `held` keeps the memory, `written` what the host wrote last, if a little."""

    dtype: Dtype
    shape: tuple[int, ...]
    address: int
    held: ort.OrtValue
    written: Array | None
    whole: bool = True

    def write(self, values: Array) -> None:
        """See `Buffer.write`."""
        check_whole(self.whole)
        check_values(self, values)
        flat = np.ascontiguousarray(values).reshape(-1)
        self.held.update_inplace(flat)
        if self.written is not None:
            self.written[...] = flat

    def read(self) -> Array:
        """See `Buffer.read`."""
        check_whole(self.whole)
        return np.array(self.held.numpy()).reshape(self.shape)

    def part(self, *shape: int) -> Self:
        """See `Buffer.part`."""
        check_part(self, shape)
        return replace(self, shape=shape, whole=self.whole and shape == self.shape)


class OnnxRuntimeProgram:
    """See `redraft.engines.device.Program`."""

    def __init__(
        self, session: ort.InferenceSession, device: str, inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...], on_host: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.inputs = inputs
        self.outputs = outputs
        self._session = session
        self._device = device
        self._on_host = on_host

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """See `Program.bind`."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        binding = self._session.io_binding()
        for specs, add in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for spec in specs:
                buffer = buffers[spec.name]
                kind: Any = _BFLOAT16 if buffer.dtype == "bfloat16" else np.dtype(buffer.dtype)
                device, address = self._place(spec, buffer)
                add(spec.name, device, 0, kind, buffer.shape, address)
        native, bound, keep = self._session._sess, binding._iobinding, (binding, dict(buffers))

        def run(_keep: object = keep) -> None:
            native.run_with_iobinding(bound, None)

        return run

    def _place(self, spec: TensorSpec, buffer: Buffer) -> tuple[str, int]:
        """The device and the address to bind a tensor at."""
        if spec.name not in self._on_host:
            return self._device, buffer.address
        written = buffer.written if isinstance(buffer, OnnxRuntimeBuffer) else None
        assert written is not None
        return "cpu", int(written.ctypes.data)


def host_inputs(session: ort.InferenceSession) -> frozenset[str]:
    """Inputs that the session reads on the host."""
    places = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return frozenset(value.name for value, place in places if place.name != "Cuda")


def left_to_cpu(assignment: Iterable[Any]) -> str:
    """Node types that a session's provider left to the CPU, those that make sizes aside: `TopK (2), Attention (1)`."""
    kinds = [
        node.op_type
        for part in assignment
        if part.ep_name == PROVIDERS["cpu"]
        for node in part.get_nodes()
        if node.op_type not in _SIZES
    ]
    return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
