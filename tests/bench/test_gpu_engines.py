"""The GPU measurement of engines, over the device path on the CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.lyanna_bundle import write_lyanna_bundle

from redraft.bench import gpu_engines
from redraft.bench.gpu_device import missing_device
from redraft.engines import open_bundle
from redraft.errors import BundleError
from redraft.runtime import Runtime

OPTIONS = ("--max-new-tokens", "12", "--budget", "nodes=6,depth=2,width=3")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return write_lyanna_bundle(tmp_path_factory.mktemp("lyanna"))


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "p1", "category": "letters", "turns": ["abcd"]}) + "\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu_engines", *map(str, options), *OPTIONS])
    return gpu_engines.main()


def test_every_section(bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "engines.json"
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu", "--out", out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert found["tokens"] == {method: {"prompts": 1, "differences": []} for method in ("none", "ngram", "lyanna")}
    assert set(found["curve"]["ms"]) == {"1", "2", "4", "8", "13", "16", "32", "64"}
    assert all(ms > 0 for ms in found["curve"]["ms"].values())
    assert found["plain"] == {"skipped": "on the CPU `redraft profile --roofline` compares with the memory"}
    assert ["step", "verify", "engine.verifier"] in [stage["path"] for stage in found["stages"]["stages"]]
    assert found["bound"]["mean_acceptance_length"] > 1
    assert found["bundle"]["random_weights"] is False


def test_a_wrong_token_is_found(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's lead at that place, which tells a near-tie from an error."""
    generate = Runtime.generate

    def wrong(self: Runtime, *given: Any, **options: Any) -> Any:
        outputs = generate(self, *given, **options)
        if self.verifier.device is None:
            return outputs
        return [replace(o, token_ids=(*o.token_ids[:3], 99, *o.token_ids[4:])) for o in outputs]

    monkeypatch.setattr(Runtime, "generate", wrong)
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu")["tokens"]
    for method in ("none", "ngram", "lyanna"):
        (difference,) = found[method]["differences"]
        assert (difference["prompt"], difference["token"]) == ("p1", 3)
        assert difference["gap"] > 0


def test_random_weights_are_not_compared(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_bundle(bundle, verify=False)
    model = replace(opened.manifest.model, random_weights=True)
    labelled = replace(opened, manifest=replace(opened.manifest, model=model))
    monkeypatch.setattr(gpu_engines, "open_bundle", lambda path, verify: labelled)
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu")
    assert found["tokens"] == {"skipped": "random weights: rounding decides every token"}
    assert found["bundle"]["random_weights"] is True


@pytest.mark.skipif(missing_device() is None, reason="a CUDA device is here")
def test_without_a_device_the_report_says_why(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--engines", bundle, "--prompts", prompts) == {"skipped": missing_device()}


def test_without_what_runs_the_engines_the_report_says_why(
    bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engines, "missing_device", lambda: None)
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts)
    assert "CUDAExecutionProvider; install onnxruntime-gpu" in found["skipped"]


def test_an_error_is_no_reason_to_skip(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="expected an engine bundle"):
        run(monkeypatch, "--engines", tmp_path / "none", "--prompts", prompts, "--device", "cpu")
