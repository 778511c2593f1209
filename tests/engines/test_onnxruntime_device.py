"""What ONNX Runtime says of a session: which nodes its provider left to the CPU, which inputs it reads on the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from redraft import names
from redraft.engines import onnxruntime_device, open_device
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.onnxruntime_backend import RECORD_ASSIGNMENT
from redraft.engines.onnxruntime_device import OnnxRuntimeDevice, host_inputs, left_to_cpu
from redraft.errors import BackendError, BundleError

from .bundles import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("bundle") / "small"
    write_bundle(out)
    return open_bundle(out)


@dataclass
class Assigned:
    """A part of a graph that went to a provider."""

    ep_name: str
    kinds: tuple[str, ...]

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(op_type=kind) for kind in self.kinds]


def test_nodes_left_to_the_cpu_are_counted_but_for_those_that_make_sizes() -> None:
    parts = [
        Assigned("CUDAExecutionProvider", ("MatMul", "TopK")), Assigned("CPUExecutionProvider", ("Shape", "TopK")),
        Assigned("CPUExecutionProvider", ("Attention",)), Assigned("CPUExecutionProvider", ("TopK", "Gather")),
    ]  # fmt: skip
    assert left_to_cpu(parts) == "TopK (2), Attention (1)"
    assert left_to_cpu(parts[:1]) == ""


def test_a_real_session_says_which_nodes_the_cpu_has(bundle: Bundle) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    session = ort.InferenceSession(bundle.path / "verifier.onnx", options, providers=["CPUExecutionProvider"])
    assert "TensorScatter" in left_to_cpu(session.get_provider_graph_assignment_info())
    assert names.LIVE in host_inputs(session)


def test_a_build_without_cuda_is_refused_in_one_line(bundle: Bundle) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this build has CUDA")
    with pytest.raises(BackendError, match="not on CUDAExecutionProvider; install onnxruntime-gpu"):
        open_device(bundle, "cuda")


class Session:
    """A session on a GPU: it reads `host` on the host and left `kinds` to the CPU."""

    def __init__(self, bundle: Bundle, host: tuple[str, ...], kinds: tuple[str, ...]) -> None:
        self.inputs = [SimpleNamespace(name=spec.name) for spec in bundle.graph(names.VERIFIER).inputs]
        self.host = host
        self.parts = [Assigned("CPUExecutionProvider", kinds)]
        self.bound: dict[str, tuple[str, int]] = {}
        self._sess = None

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cpu" if value.name in self.host else "Cuda") for value in self.inputs]

    def get_provider_graph_assignment_info(self) -> list[Assigned]:
        return self.parts

    def io_binding(self) -> Any:
        def bind(name: str, device: str, number: int, kind: Any, shape: tuple[int, ...], address: int) -> None:
            self.bound[name] = device, address

        return SimpleNamespace(bind_input=bind, bind_output=bind, _iobinding=None)


@pytest.fixture
def gpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeDevice:
    """A device that believes to be one; its memory is the host's."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(onnxruntime_device.PROVIDERS.values()))
    made = ort.OrtValue.ortvalue_from_numpy
    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_numpy", lambda array, device, number: made(array.copy()))
    return OnnxRuntimeDevice(bundle, "cuda", 1)


def loaded(monkeypatch: pytest.MonkeyPatch, session: Session) -> list[Any]:
    """Let programs be this session; what was asked of ONNX Runtime."""
    asked: list[Any] = []
    monkeypatch.setattr(onnxruntime_device, "load_session", lambda *args: asked.append(args) or session)
    return asked


def test_sizes_are_bound_where_the_host_writes_them(
    bundle: Bundle, gpu: OnnxRuntimeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound on the GPU they would be copied once, when they are bound, and never again."""
    session = Session(bundle, (names.LIVE,), ())
    asked = loaded(monkeypatch, session)
    program = gpu.program(names.VERIFIER)
    provider = ("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    assert asked[0][3] == provider
    sizes = {"B": 1, "T": 2, "R": 2, "C": 8}
    buffers: dict[str, Any] = {}
    for spec in (*program.inputs, *program.outputs):
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        buffers[spec.name] = buffers[spec.in_place_of] if spec.in_place_of else gpu.empty(spec.dtype, *shape)
    program.bind(buffers)
    device, address = session.bound[names.LIVE]
    assert device == "cpu"
    assert address != buffers[names.LIVE].address
    buffers[names.LIVE].write(np.array([7]))
    assert (np.ctypeslib.ctypes.c_int64).from_address(address).value == 7
    assert buffers[names.LIVE].read().tolist() == [7]
    assert session.bound[names.PAST_LEN] == ("cuda", buffers[names.PAST_LEN].address)


def test_a_copy_on_the_gpu_is_cudas_and_done_when_it_returns(
    gpu: OnnxRuntimeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    cuda = SimpleNamespace(copy=lambda *given: called.append(given), synchronize=lambda: called.append("waited"))
    monkeypatch.setattr(onnxruntime_device, "open_cuda", lambda: cuda)
    source, target = gpu.empty("float16", 5), gpu.empty("float16", 5)
    gpu.copy(target, source)()
    assert called == [(target.address, source.address, 10), "waited"]


def test_falling_back_is_loud(
    bundle: Bundle, gpu: OnnxRuntimeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(monkeypatch, Session(bundle, (names.LIVE,), ("Shape", "Attention")))
    gpu.program(names.VERIFIER)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("leaves nodes to the CPU, which costs time: Attention (1)")


def test_an_input_that_only_the_device_knows_is_not_read_on_the_host(
    bundle: Bundle, gpu: OnnxRuntimeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(monkeypatch, Session(bundle, (names.TREE_MASK,), ()))
    with pytest.raises(BundleError, match="leaves what reads tree_mask to the CPU"):
        gpu.program(names.VERIFIER)
