"""ONNX Runtime's reports on a session: nodes that its provider left to the CPU, inputs that it reads on the host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from redraft import names
from redraft.engines import open_device
from redraft.engines.bundle import Bundle, open_bundle
from redraft.engines.onnxruntime_backend import RECORD_ASSIGNMENT
from redraft.engines.onnxruntime_device import (
    CPU,
    OnnxRuntimeCuda,
    OnnxRuntimeProgram,
    host_inputs,
    left_to_cpu,
)
from redraft.errors import BackendError, BundleError
from tests.standins.cuda import FakeCuda

from .bundles import buffers_of, write_bundle
from .fake_onnxruntime import QueuedSession, onnxruntime_cuda


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


def test_a_real_session_reports_nodes_on_the_cpu(bundle: Bundle) -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    session = ort.InferenceSession(bundle.path / "verifier.onnx", options, providers=["CPUExecutionProvider"])
    assert "TensorScatter" in left_to_cpu(session.get_provider_graph_assignment_info())
    assert names.KV_LEN in host_inputs(session)


def test_a_build_without_cuda_is_refused_in_one_line(bundle: Bundle) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this build has CUDA")
    with pytest.raises(BackendError, match=r"not on CUDAExecutionProvider; .* install onnxruntime-gpu\[cuda,cudnn\]"):
        open_device(bundle, "cuda")


@pytest.fixture
def gpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeCuda:
    return onnxruntime_cuda(bundle, monkeypatch)


def test_sizes_are_bound_in_host_memory(bundle: Bundle, gpu: OnnxRuntimeCuda) -> None:
    """If bound on the GPU, they would be copied only once, at binding."""
    program = gpu.program(names.VERIFIER)
    assert isinstance(program, OnnxRuntimeProgram)
    buffers = buffers_of(gpu, program, B=1, T=2, R=2, C=8)
    with pytest.raises(BackendError, match="reads kv_len on the host, but the tensor is only on the GPU"):
        program.bind(buffers)
    host_inputs = gpu.host_inputs(**{names.KV_LEN: (1,), names.CACHE_LEN: (1,)})
    buffers |= host_inputs.buffers
    buffers[names.TREE_MASK].write(np.tri(2, dtype=np.bool_)[None])
    work = gpu.chain([host_inputs.send, program.bind(buffers)])
    found = []
    for past in (0, 3, 0):
        values = host_inputs.open()
        values[names.CACHE_LEN][0], values[names.KV_LEN][0] = past, past + 2
        work()
        found.append(buffers[names.LOGITS].read())
    bound = program._session.bound
    assert bound[names.KV_LEN] == ("cpu", host_inputs.open()[names.KV_LEN].ctypes.data)
    assert bound[names.CACHE_LEN] == ("cuda", buffers[names.CACHE_LEN].address)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


def test_falling_back_is_loud(
    bundle: Bundle, gpu: OnnxRuntimeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(QueuedSession, "assignment", [Assigned(CPU, ("Shape", "Attention"))])
    gpu.program(names.VERIFIER)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("leaves nodes to the CPU, which costs time: Attention (1)")


def test_an_input_that_only_the_device_knows_is_not_read_on_the_host(
    bundle: Bundle, gpu: OnnxRuntimeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueuedSession, "host", (names.TREE_MASK,))
    with pytest.raises(BundleError, match="leaves nodes that read tree_mask to the CPU"):
        gpu.program(names.VERIFIER)


def test_weights_are_asked_for_before_they_are_loaded(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = bundle.graph_bytes(names.VERIFIER)
    assert weights == (bundle.path / "verifier.onnx").stat().st_size
    small = onnxruntime_cuda(bundle, monkeypatch, FakeCuda(weights))
    with pytest.raises(BackendError, match=r"GPU memory needed \(engines .* MiB, KV .* MiB\)"):
        small.expect({"KV": 1 << 20}, [names.VERIFIER])
