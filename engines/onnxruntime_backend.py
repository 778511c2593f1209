"""Sessions of ONNX Runtime: options, providers that start or refuse, and checks against the manifest."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort

from redraft import names
from redraft.cpus import default_threads
from redraft.engines.bundle import Bundle
from redraft.engines.host_memory import available_bytes, huge_pages
from redraft.errors import BackendError, BundleError, KernelError
from redraft.names import TensorSpec
from redraft.packages import gpu_requirement
from redraft.plugins.operators import OFF, OPERATOR_NAMES, OPERATORS_VARIABLE, Operators, find_operators

_ORT = {"int64": "tensor(int64)", "int32": "tensor(int32)", "int8": "tensor(int8)", "uint8": "tensor(uint8)",
        "bool": "tensor(bool)", "float32": "tensor(float)", "float16": "tensor(float16)",
        "bfloat16": "tensor(bfloat16)"}  # fmt: skip
_WIDENED = {"fp16": 2}
"""ONNX Runtime's CPU kernels compute in fp32, so it holds fp32 copies of other floating-point weights."""
_GIB = 1 << 30
_AFFINITIES = "session.intra_op_thread_affinities"
"""Processors of each thread but the calling one, which is not the session's."""
_SPIN_US = "100"
"""Time for which an idle thread spins before it sleeps."""
Provider = tuple[str, Mapping[str, str]]
"""An execution provider and its options."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_WEIGHTS_OUTSIDE_ARENA = "session.use_device_allocator_for_initializers"
_SEVERITY = {"warning": 2, "error": 3}
_MESSAGE_CHARACTERS = 300
_PROBE = (
    b'\x08\x08:/\n\x10\n\x01a\x12\x01b"\x08Identity\x12\x01g'
    b"Z\x0b\n\x01a\x12\x06\n\x04\x08\x01\x12\x00b\x0b\n\x01b\x12\x06\n\x04\x08\x01\x12\x00B\x04\n\x00\x10\x11"
)
"""An ONNX model whose only node is Identity, of a float32 scalar."""
_LOG = logging.getLogger("redraft.onnxruntime")


def load_session(
    bundle: Bundle, graph: str, threads: int | None = None, provider: Provider = (CPU, {}), log: str = "error"
) -> ort.InferenceSession:
    """Return a session of the graph on a provider, with the manifest's signature.

    Raises BundleError like `load_program`, BackendError if the host has too little memory or the provider does not
    start, and KernelError for unusable operators. The CPU never replaces the provider.
    """
    record = bundle.graph(graph)
    _check_version(bundle)
    if bundle.manifest.precision == "bf16" and provider[0] == CPU:
        raise BundleError(
            f"{bundle.path}: ONNX Runtime has no CPU kernels for bf16", "build it with --precision fp16 or fp32"
        )
    path, options = str(bundle.path / record.file), session_options(threads, log)
    if provider[0] == CPU:
        _check_memory(bundle, graph)
        if _has_operators(Path(path)) and (operators := find_operators()):
            register_operators(options, operators)
    else:
        start_provider(provider[0])
        options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
        options.add_session_config_entry(_WEIGHTS_OUTSIDE_ARENA, "1")
    try:
        with huge_pages():
            session = ort.InferenceSession(path, options, providers=[provider], enable_fallback=0)
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        if provider[0] != CPU and isinstance(error, RuntimeError):  # none of which is for a graph
            raise _not_started(provider[0], _one_line(error)) from error
        raise bundle.error(f"graph {graph} does not load: {_one_line(error)}") from error
    _check_in_use(session, provider[0])
    for found, specs in ((session.get_inputs(), record.inputs), (session.get_outputs(), record.outputs)):
        if problem := next(_mismatches(found, specs), None):
            raise bundle.error(f"graph {graph}: {problem}")
    return session


def _has_operators(path: Path) -> bool:
    """Return True if a graph's file has one of redraft's operators.

    In a graph that does not import com.microsoft, a session that registers them lacks ONNX Runtime's own operators.
    """
    data = path.read_bytes()  # a node has its type's length and name in field 4
    return any(b"\x22" + bytes([len(name)]) + name.encode() in data for name in OPERATOR_NAMES)


def register_operators(options: ort.SessionOptions, operators: Operators) -> None:
    """Let a session compute with these operators. Raises KernelError if they refuse this ONNX Runtime."""
    try:
        options.register_custom_ops_library(str(operators.path))
    except Exception as error:  # ONNX Runtime's errors have no class in common
        hint = f"set {OPERATORS_VARIABLE}={OFF} to run ONNX Runtime's own kernels"
        raise KernelError(f"{operators.path}: {_one_line(error)}", hint) from error


def check_available(provider: str) -> None:
    """Raise BackendError if this build of ONNX Runtime does not have the provider."""
    available = ort.get_available_providers()
    if provider not in available:
        raise BackendError(
            f"this ONNX Runtime runs on {', '.join(available)}, not on {provider}",
            f"run `pip uninstall -y onnxruntime` and install {_gpu_package()} instead",
        )


@cache
def start_provider(provider: str) -> None:
    """Start a provider on a model of one node, before reading any weights. Raises BackendError if it does not start.

    If the provider's libraries are missing, ONNX Runtime logs that and returns a CPU session. That session loads all
    weights in host memory, or fails for a kernel that only the provider has.
    """
    check_available(provider)
    if provider == CUDA:
        preload_cuda()
    try:
        session = ort.InferenceSession(_PROBE, session_options(1, "error"), providers=[provider], enable_fallback=0)
    except Exception as error:  # as above
        raise _not_started(provider, _one_line(error)) from error
    _check_in_use(session, provider)


@cache
def preload_cuda() -> str:
    """Load pip's CUDA and cuDNN, which are not on the loader's path, once in a process.

    Returns the first library that did not load, or an empty string. The provider may still find that library.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # it prints, but the standard output is for JSON and texts
        ort.preload_dlls()
    lines = [line.strip() for line in printed.getvalue().splitlines() if line.strip()]
    for line in lines:
        _LOG.info("%s", line)
    return lines[0] if lines else ""


def _check_memory(bundle: Bundle, graph: str) -> None:
    """Raise BackendError if the graph's weights need more memory than the host has, which would end the process."""
    available = available_bytes()
    stored = bundle.graph_bytes(graph)
    needed = stored * _WIDENED.get(bundle.manifest.precision, 1)
    if available is not None and needed > available:
        widened = f", {stored / _GIB:.1f} in {bundle.manifest.precision}" if needed != stored else ""
        raise BackendError(
            f"the weights of {graph} take {needed / _GIB:.1f} GiB of memory{widened}; {available / _GIB:.1f} are free",
            "build with --precision int8 or int4, or free memory",
        )


def _check_in_use(session: ort.InferenceSession, provider: str) -> None:
    if provider not in session.get_providers():
        missing = preload_cuda() if provider == CUDA else ""
        raise _not_started(provider, missing or "see its log above")


def _not_started(provider: str, reason: str) -> BackendError:
    cuda = (ort.cuda_version or "").partition(".")[0] or "12 or 13"
    needs = f"it needs CUDA {cuda}, cuDNN 9 and a driver for them: install {_gpu_package()}"
    return BackendError(f"ONNX Runtime cannot start {provider}: {reason}", needs)


def _gpu_package() -> str:
    return gpu_requirement("onnxruntime", ort.__version__)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MESSAGE_CHARACTERS]


def session_options(threads: int | None, log: str) -> ort.SessionOptions:
    """Return options of a session with its own thread pool, whose idle threads spin for a moment.

    Without `threads`, it has the default number (`redraft.cpus`), on one NUMA node.

    Without spinning, a step of a small model takes twice as long. With endless spinning, idle threads of one engine
    hold the cores that the bundle's next engine needs, which costs up to three times as much. ONNX Runtime's
    process-wide pool would avoid both, but refuses every other session of the process.
    """
    options = ort.SessionOptions()
    default = default_threads()
    options.intra_op_num_threads = threads or default.count
    if threads is None and default.node and default.count > 1:
        node = ",".join(str(cpu + 1) for cpu in default.node)  # ONNX Runtime counts processors from one
        options.add_session_config_entry(_AFFINITIES, ";".join([node] * (default.count - 1)))
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _SEVERITY[log]
    return options


def _check_version(bundle: Bundle) -> None:
    built, here = bundle.manifest.backend_version, ort.__version__
    if bundle.manifest.backend == "onnxruntime" and _version(here) < _version(built):
        raise bundle.error(f"expected ONNX Runtime {built} or newer, found {here}; install onnxruntime>={built}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _mismatches(found: list[Any], specs: tuple[TensorSpec, ...]) -> Iterator[str]:
    """Yield the differences between a session's tensors and the manifest's, one line each."""
    tensors = {tensor.name: tensor for tensor in found}
    for spec in specs:
        tensor = tensors.pop(spec.name, None)
        if tensor is None:
            yield f"expected tensor {spec.name}, found none"
        elif tensor.type != _ORT.get(spec.dtype) or not _same_shape(tensor.shape, spec.shape):
            yield f"expected {spec.name} {spec.dtype}{list(spec.shape)}, found {tensor.type}{tensor.shape}"
    for name in tensors:
        yield f"unexpected tensor {name}"


def _same_shape(found: list[int | str | None], expected: tuple[names.Dim, ...]) -> bool:
    """Compare rank and fixed sizes. A symbol may have any name, and an output may leave a fixed size open."""
    return len(found) == len(expected) and all(
        not isinstance(a, int) or a == b for a, b in zip(found, expected, strict=True)
    )
