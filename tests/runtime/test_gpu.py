"""Text on a device that rounds differently from the host: tokens differ only at near-ties of the host's logits.

These tests run on ONNX Runtime on the CPU, on TensorRT's fakes, and on a GPU with CUDA and TensorRT's engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from redraft import names
from redraft.bench.gpu import missing
from redraft.bench.statistics import first_difference
from redraft.engines import open_bundle
from redraft.engines import tensorrt_device as tensorrt
from redraft.engines.cuda_device import CudaDevice
from redraft.engines.device import Device
from redraft.engines.tensorrt.target import find_target
from redraft.errors import BackendError
from redraft.runtime import Generation, Runtime, SamplingParams, SpeculationParams, api
from redraft.types import Budget
from tests.engines.bundles import build_tiny
from tests.engines.test_gpu_attention import lower, native_missing

from .devices import cpu_device, open_over, tensorrt_device
from .lyanna_bundle import FULL
from .lyanna_bundle import PROMPTS as IDS

PROMPTS = ["def fibonacci(n):", "Once upon a time there was", "Question: Tom has 3 apples and buys 4 more."]
PARAMS = SamplingParams(max_tokens=64)
WHOLE = Budget(12, 4, 4)
RUNS = {"none": ("none", None), "ngram": ("ngram", WHOLE), "ngram-adaptive": ("ngram", None),
        "lyanna": ("lyanna", WHOLE), "lyanna-adaptive": ("ngram+lyanna", None)}  # fmt: skip
"""Methods with their budgets. Without a budget, the controller chooses each tree's size."""
NEAR_TIE = 1e-3
"""Largest lead of the host's logits that another order of sums may reverse. Both compute in fp32."""


def host_texts(bundle: Path, prompts: Sequence[api.Prompt], params: SamplingParams) -> list[Generation]:
    """Return the host's texts without drafting, with the lead of every token."""
    with Runtime.open(bundle, device=None, verify=False) as host:
        return host.generate(prompts, params, "none", record_logit_margins=True)


def compare_texts(found: Sequence[Generation], expected: Sequence[Generation]) -> int:
    """Return how many texts differ from the host's at a near-tie. Raises AssertionError for any other difference."""
    ties = 0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        place = first_difference(ours.token_ids, theirs.token_ids)
        if place is None:
            continue
        assert theirs.logit_margins is not None
        shorter = min(len(ours.token_ids), len(theirs.token_ids))
        assert place < shorter, f"text {number}: {len(ours.token_ids)} tokens, expected {len(theirs.token_ids)}"
        assert theirs.logit_margins[place] < NEAR_TIE, (
            f"text {number}: token {place} is {ours.token_ids[place]}, expected {theirs.token_ids[place]}, which "
            f"leads the host's logits by {theirs.logit_margins[place]:.2g}"
        )
        ties += 1
    return ties


def check_captured(device: Device) -> None:
    """Raise AssertionError if no step became a CUDA graph, or if a capture failed."""
    assert isinstance(device, CudaDevice), f"nothing is captured on {device.name}"
    cuda = device.cuda
    assert not cuda.warned, "a step could not be captured as a CUDA graph"
    assert cuda.captured > 0, "no step was captured as a CUDA graph"


# --- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("kind", "run"), [("tensorrt", "lyanna"), ("tensorrt-native", "ngram"), ("tensorrt-native", "lyanna-adaptive")]
)
def test_the_hosts_tokens_without_a_gpu(lyanna_bundle: Path, tmp_path: Path, kind: str, run: str) -> None:
    method, size = RUNS[run]
    bundle = open_bundle(lyanna_bundle, verify=False)
    if kind == "tensorrt-native":
        bundle = lower(bundle, tmp_path / "native")
    host = (names.KV_LEN,) if kind == "tensorrt-native" else ()  # inputs that the verifier's engine reads there
    device = tensorrt_device(bundle, tmp_path, host=host).device
    params = SamplingParams(max_tokens=24)
    expected = host_texts(lyanna_bundle, IDS[:4], params)
    with open_over(device, lyanna_bundle, max_num_seqs=2) as runtime:
        found = runtime.generate(IDS[:4], params, SpeculationParams(method, budget=size and FULL))
        if kind == "tensorrt":
            check_captured(device)
    assert compare_texts(found, expected) == 0


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", ["cpu", "refused", "no step"])
def test_steps_that_were_not_captured_are_an_error(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A device on the host captures no step, CUDA may refuse to, and the third runtime runs none."""
    bundle = open_bundle(lyanna_bundle, verify=False)
    device: Device = cpu_device(bundle)
    if kind != "cpu":
        fakes = tensorrt_device(bundle, tmp_path)
        device = fakes.device
        if kind == "refused":
            monkeypatch.setattr(fakes.device.cuda, "capture", refuse)
    if kind != "no step":
        with open_over(device, lyanna_bundle) as runtime:
            runtime.generate(IDS[:1], SamplingParams(max_tokens=8), "none")
    with pytest.raises(AssertionError, match="captured"):
        check_captured(device)


def refuse(run: Any) -> Any:
    """Fail as a capture that CUDA refuses."""
    raise BackendError("cudaStreamEndCapture failed")


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_wrong_token_or_length_is_an_error_unless_the_host_nearly_tied(lyanna_bundle: Path, place: int) -> None:
    (generation,) = host_texts(lyanna_bundle, IDS[:1], SamplingParams(max_tokens=12, ignore_eos=True))
    ids = generation.token_ids
    wrong = replace(generation, token_ids=(*ids[:place], -1, *ids[place + 1 :]))
    clear, tied = (
        replace(generation, logit_margins=(*[margin] * place, lead, *[margin] * 11))
        for margin, lead in ((0.0, 0.5), (0.5, 1e-4))
    )
    with pytest.raises(AssertionError, match=f"text 1: token {place} is -1"):
        compare_texts([generation, wrong], [generation, clear])
    assert compare_texts([generation, wrong], [generation, tied]) == 1
    for other in (ids[:-1], (*ids, 3)):
        with pytest.raises(AssertionError, match=r"text 0: 1[13] tokens, expected 12"):
            compare_texts([replace(generation, token_ids=other)], [replace(generation, logit_margins=(0.0,) * 13)])


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(root, tmp_path_factory.mktemp("host") / "tiny", "onnxruntime", "fp32", None).path


@dataclass(frozen=True)
class Built:
    """A bundle that the GPU runs. captured: True if its steps become CUDA graphs."""

    path: Path
    captured: bool


@pytest.fixture(scope="module", params=["onnxruntime", "tensorrt", "tensorrt-native"])
def on_device(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Skip if a library or a GPU is missing; a failing one is an error.

    Native attention runs without our kernels, since an engine moves the accepted rows.
    """
    backend, _, attention = request.param.partition("-")
    if reason := missing(backend):
        pytest.skip(reason)
    if backend == "onnxruntime":
        yield Built(Path(request.getfixturevalue("host")), False)
        return
    folder = tmp_path_factory.mktemp(request.param)
    if attention and (reason := native_missing(find_target().release, folder)):
        pytest.skip(reason)
    built = build_tiny(root, folder / "tiny", backend, "fp32", attention or None).path
    with pytest.MonkeyPatch.context() as patch:
        if attention:
            patch.setattr(tensorrt, "find_kernels", lambda: None)
        yield Built(built, not attention)


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "size"), RUNS.values(), ids=RUNS)
def test_the_hosts_tokens(on_device: Built, host: Path, method: str, size: Budget | None) -> None:
    """Three texts share two slots, so that one moves."""
    with Runtime.open(on_device.path, device="cuda", max_num_seqs=2) as runtime:
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams(method, budget=size))
        if on_device.captured:
            assert runtime.verifier.device is not None
            check_captured(runtime.verifier.device)
    print(f"{compare_texts(found, host_texts(host, PROMPTS, PARAMS))} near-ties")
