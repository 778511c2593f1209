"""Programs on ONNX Runtime over buffers of the host, or of a GPU with ONNX Runtime's GPU build.

Every tensor is bound by its address, so programs need no copies between them.

On CUDA, the sessions use redraft's stream and do not wait for their end, so that redraft's copies and kernels run in
order with theirs. If a session reads an input on the host, its host array (`Buffer.host`) is bound, since ONNX Runtime
would copy an input from the GPU only once, at binding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact
from redraft.engines.cuda import Cuda, open_cuda
from redraft.engines.cuda_device import CudaDevice
from redraft.engines.device import Buffer, Program, Run
from redraft.engines.manifest import GraphRecord
from redraft.engines.onnxruntime_backend import CPU, CUDA, check_available, load_session
from redraft.errors import BackendError
from redraft.names import TensorSpec
from redraft.plugins.library import find_kernels

NO_WAITING = "disable_synchronize_execution_providers"
"""Options of a run on CUDA: ONNX Runtime does not wait for the end of its work on the stream."""
_Place = tuple[str, str, int, Any, tuple[int, ...]]
"""A tensor's name, device, address, element type and shape."""
_LOG = logging.getLogger("redraft.onnxruntime")
_BFLOAT16 = 16
"""ONNX's number of a type that NumPy lacks."""
_SIZES = frozenset({
    "Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Mul", "Range",
    "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
})  # fmt: skip
"""Node types that ONNX Runtime computes on the host on purpose if they compute sizes of tensors."""


def open_onnxruntime_cuda(bundle: Bundle, threads: int | None = None) -> OnnxRuntimeCuda:
    """Return the GPU. Raises BackendError if this ONNX Runtime has no CUDA or the GPU does not work."""
    check_available(CUDA)
    return OnnxRuntimeCuda(bundle, open_cuda(), find_kernels(), threads)


def load_program(bundle: Bundle, graph: str, threads: int | None = None, log: str = "error") -> OnnxRuntimeProgram:
    """Load a graph of the bundle on the CPU with `threads` threads (None: one for each core of this process).

    Raises BundleError if the graph is absent, does not load, or has another signature than in the manifest, and if this
    ONNX Runtime is older than the one that the bundle was built with.
    """
    record = bundle.graph(graph)
    return OnnxRuntimeProgram(load_session(bundle, graph, threads, log=log), record)


class OnnxRuntimeCuda(CudaDevice):
    """Sessions of ONNX Runtime on redraft's stream."""

    def __init__(self, bundle: Bundle, cuda: Cuda, kernels: Compact | None = None, threads: int | None = None) -> None:
        super().__init__(bundle, cuda, kernels)
        self._threads = threads
        self._without_waiting = ort.RunOptions()
        self._without_waiting.add_run_config_entry(NO_WAITING, "1")

    def _loaded_bytes(self, graph: str) -> int:
        """The graphs of a bundle share weights, which each session loads for itself."""
        return self._bundle.graph_bytes(graph)

    def _load(self, graph: str, record: GraphRecord) -> Program:
        options = {
            "user_compute_stream": str(self.cuda.stream),
            "arena_extend_strategy": "kSameAsRequested",  # growth by powers of two takes up to twice the need
            "use_tf32": "0",  # no TF32: float32 gives the tokens of the CPU
        }
        session = load_session(self._bundle, graph, self._threads, (CUDA, options))
        on_host = host_inputs(session)
        if wrong := sorted(on_host - {names.KV_LEN}):
            raise self._bundle.error(f"graph {graph}: {CUDA} leaves nodes that read {', '.join(wrong)} to the CPU")
        if left := left_to_cpu(session.get_provider_graph_assignment_info()):
            _LOG.warning("graph %s: %s leaves nodes to the CPU, which costs time: %s", graph, CUDA, left)
        return OnnxRuntimeProgram(session, record, self.name, on_host, self._without_waiting)


class OnnxRuntimeProgram(Program):
    """A session of ONNX Runtime. on_host: inputs that the session reads on the host; options: of its runs."""

    def __init__(
        self, session: ort.InferenceSession, record: GraphRecord, device: str = "cpu",
        on_host: frozenset[str] = frozenset(), options: ort.RunOptions | None = None,
    ) -> None:  # fmt: skip
        super().__init__(record)
        self._session = session
        self._device = device
        self._on_host = on_host
        self._options = options
        self._binding = session.io_binding()
        self._places: tuple[_Place, ...] | None = None
        """What the binding has: one for all runs, since they follow each other."""

    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        places = tuple([self._place(spec, buffers[spec.name]) for spec in (*self.inputs, *self.outputs)])
        native, bound, options = self._session._sess, self._binding._iobinding, self._options
        keep = dict(buffers)

        def run(_keep: object = keep) -> None:
            if places is not self._places:
                self._use(places)
            native.run_with_iobinding(bound, options)

        return run

    def _use(self, places: tuple[_Place, ...]) -> None:
        """Let the session's next run use these places. Only those that change are bound, since binding takes time."""
        inputs, known = len(self.inputs), self._places or [None] * len(places)
        self._places = None
        for number, (place, before) in enumerate(zip(places, known, strict=True)):
            if place != before:
                name, device, address, kind, shape = place
                add = self._binding.bind_input if number < inputs else self._binding.bind_output
                add(name, device, 0, kind, shape, address)
        self._places = places

    def _place(self, spec: TensorSpec, buffer: Buffer) -> _Place:
        """Return where a tensor is bound: on the host, if the session reads it there."""
        device, address = self._device, buffer.address
        if spec.name in self._on_host:
            if buffer.host is None:
                raise BackendError(f"a session reads {spec.name} on the host, but the tensor is only on the GPU")
            device, address = "cpu", int(buffer.host.ctypes.data)
        kind: Any = _BFLOAT16 if buffer.dtype == "bfloat16" else np.dtype(buffer.dtype)
        return spec.name, device, address, kind, buffer.shape


def host_inputs(session: ort.InferenceSession) -> frozenset[str]:
    """Return the inputs that the session reads on the host."""
    places = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return frozenset(value.name for value, place in places if place.name != "Cuda")


def left_to_cpu(assignment: Iterable[Any]) -> str:
    """Return node types that a session's provider left to the CPU, except for sizes: `TopK (2), Attention (1)`."""
    kinds = [
        node.op_type
        for part in assignment
        if part.ep_name == CPU
        for node in part.get_nodes()
        if node.op_type not in _SIZES
    ]
    return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(kinds))
