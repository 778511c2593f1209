"""Programs on ONNX Runtime over buffers of one device: `cpu`, or `cuda` with the build for it.

Every tensor is bound by its address, so that nothing is copied between programs. On CUDA the logits never leave the
device; on the CPU the same code runs over host memory, which is how it is tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import onnxruntime as ort

from redraft.engines.base import Array
from redraft.engines.bundle import Bundle
from redraft.engines.device import Buffer, Run, check_bindings, numpy_type
from redraft.engines.onnxruntime_backend import load_session
from redraft.errors import BundleError
from redraft.names import Dtype, TensorSpec

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_BFLOAT16 = 16
"""ONNX's number of the type, which NumPy lacks."""


class OnnxRuntimeDevice:
    """See `redraft.engines.device.Device`. Raises BundleError where this ONNX Runtime has no such device."""

    def __init__(self, bundle: Bundle, name: str = "cpu", threads: int | None = None) -> None:
        available = ort.get_available_providers()
        if PROVIDERS[name] not in available:
            raise BundleError(
                f"this ONNX Runtime runs on {', '.join(available)}, not on {PROVIDERS[name]}",
                "install onnxruntime-gpu in place of onnxruntime",
            )
        self.name = name
        self._bundle = bundle
        self._threads = threads

    def empty(self, dtype: Dtype, *shape: int) -> OnnxRuntimeBuffer:
        """See `Device.empty`."""
        zeros = np.zeros(math.prod(shape), numpy_type(dtype))
        held = ort.OrtValue.ortvalue_from_numpy(zeros, self.name, 0)
        return OnnxRuntimeBuffer(dtype, shape, held.data_ptr(), held)

    def program(self, graph: str) -> OnnxRuntimeProgram:
        """See `Device.program`. Raises BundleError."""
        record = self._bundle.graph(graph)
        session = load_session(self._bundle, graph, self._threads, PROVIDERS[self.name])
        return OnnxRuntimeProgram(session, self.name, record.inputs, record.outputs)

    def chain(self, runs: Sequence[Run]) -> Run:
        """See `Device.chain`: one after the other, as a graph whose sizes follow its inputs cannot be captured."""
        kept = tuple(runs)

        def run() -> None:
            for each in kept:
                each()

        return run


@dataclass(frozen=True)
class OnnxRuntimeBuffer:
    """See `redraft.engines.device.Buffer`. `held` keeps the memory."""

    dtype: Dtype
    shape: tuple[int, ...]
    address: int
    held: ort.OrtValue
    whole: bool = True

    def write(self, values: Array) -> None:
        """See `Buffer.write`."""
        self._check_whole()
        if values.shape != self.shape or values.dtype != numpy_type(self.dtype):
            raise ValueError(f"expected {self.dtype}{list(self.shape)}, found {values.dtype}{list(values.shape)}")
        self.held.update_inplace(np.ascontiguousarray(values).reshape(-1))

    def read(self) -> Array:
        """See `Buffer.read`."""
        self._check_whole()
        return np.array(self.held.numpy()).reshape(self.shape)

    def part(self, *shape: int) -> Self:
        """See `Buffer.part`."""
        if math.prod(shape) > math.prod(self.shape):
            raise ValueError(f"{list(shape)} is more than the {list(self.shape)} that the buffer holds")
        return replace(self, shape=shape, whole=self.whole and shape == self.shape)

    def _check_whole(self) -> None:
        if not self.whole:
            raise ValueError("a part of a buffer can be bound, not read or written")


class OnnxRuntimeProgram:
    """See `redraft.engines.device.Program`."""

    def __init__(
        self, session: ort.InferenceSession, device: str, inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:  # fmt: skip
        self.inputs = inputs
        self.outputs = outputs
        self._session = session
        self._device = device

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """See `Program.bind`."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        binding = self._session.io_binding()
        for specs, add in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for spec in specs:
                buffer = buffers[spec.name]
                kind: Any = _BFLOAT16 if buffer.dtype == "bfloat16" else np.dtype(buffer.dtype)
                add(spec.name, self._device, 0, kind, buffer.shape, buffer.address)
        native, bound, keep = self._session._sess, binding._iobinding, (binding, dict(buffers))

        def run(_keep: object = keep) -> None:
            native.run_with_iobinding(bound, None)

        return run
