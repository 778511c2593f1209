"""Engines on a GPU: the host's tokens, through ONNX Runtime's CUDA and through TensorRT where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from redraft.bench.gpu_device import missing_device
from redraft.cli.assembly import build_bundle
from redraft.cli.models import Model
from redraft.config import BuildConfig, LyannaBuild
from redraft.errors import RedraftError
from redraft.runtime import Runtime, SamplingParams
from redraft.types import Budget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing_device() is not None, reason=missing_device() or "a device is here"),
]
PROMPTS = ["def fibonacci(n):", "Once upon a time there was", "Question: Tom has 3 apples and buys 4 more."]
PARAMS = SamplingParams(max_tokens=64)
WHOLE = Budget(12, 4, 4)
NEAR_TIE = 1e-3


def build(root: Path, out: Path, backend: str, precision: str) -> Path:
    """The embedded model's engines; skips where the backend is not here."""
    source = root / "assets" / "tiny"
    config = BuildConfig(backend=backend, precision=precision, lyanna=LyannaBuild(source=str(source / "lyanna")))  # type: ignore[arg-type]
    try:
        build_bundle(Model("tiny", str(source), source), config, out, {}, False, lambda message: None)
    except RedraftError as error:
        pytest.skip(str(error))
    return out


@pytest.fixture(scope="module")
def host(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(root, tmp_path_factory.mktemp("host") / "tiny", "onnxruntime", "fp32")


@pytest.fixture(scope="module", params=["onnxruntime", "tensorrt"])
def on_device(request: pytest.FixtureRequest, root: Path, host: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "onnxruntime":
        return host
    return build(root, tmp_path_factory.mktemp("tensorrt") / "tiny", "tensorrt", "fp32")


@pytest.fixture
def runtime(on_device: Path) -> Iterator[Runtime]:
    try:
        opened = Runtime.open(on_device, device="cuda", slots=2)
    except RedraftError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


@pytest.mark.parametrize("method", ["none", "ngram", "lyanna"])
def test_the_hosts_tokens(host: Path, runtime: Runtime, method: str) -> None:
    """But for near-ties of the host's own logits, where another order of sums may decide otherwise."""
    with Runtime.open(host) as plain:
        expected = plain.generate(PROMPTS, PARAMS, "none", record_gaps=True)
    found = runtime.generate(PROMPTS, PARAMS, method, None if method == "none" else WHOLE)
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, theirs.gaps or (), strict=False)
        first = next((gap for mine, its, gap in pairs if mine != its), None)
        assert first is None or first < NEAR_TIE
