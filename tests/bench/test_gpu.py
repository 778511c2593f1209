"""The GPU measurement of engines, over the device path on the CPU: its sections, wrong tokens, and missing parts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.devices import Fakes, tensorrt_device
from tests.runtime.lyanna_bundle import CONTEXT

from redraft.bench import gpu as gpu_bench
from redraft.bench import gpu_speed
from redraft.bench.gpu import WrongTokens, check_reference
from redraft.engines import open_bundle
from redraft.engines.gpu import Gpu
from redraft.errors import BackendError, BundleError, UsageError
from redraft.runtime import Runtime, SpeculationParams, api
from redraft.types import Budget

METHODS = ("none", "ngram", "lyanna")
Measure = Callable[..., dict[str, Any]]


def test_every_section(bundle: Path, tmp_path: Path, measure: Measure) -> None:
    out = tmp_path / "new" / "engines.json"
    found = measure("--engines", bundle, "--device", "cpu", "--out", out)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    same = {"prompts": 1, "differences": [], "wrong": []}
    assert {method: found["tokens"][method] for method in METHODS} == dict.fromkeys(METHODS, same)
    assert found["tokens"]["reference"] == {"bundle": str(bundle), "precision": "fp32"}
    assert set(found["curve"]["ms"]) == {"1", "2", "4", "8", "13", "16", "32", "64"}
    assert all(ms > 0 for ms in found["curve"]["ms"].values())
    assert found["curve"]["kv_len"] == CONTEXT - 1
    plain, bound = found["plain"], found["bound"]
    assert plain["skipped"] == "on the CPU `redraft profile --roofline` compares with the memory"
    assert plain["verification_ms"] == found["curve"]["ms"]["1"]
    assert plain["ms"] == bound["ms_per_step"]["plain"]
    assert "no logits" in bound["path_timed"]
    assert all(ms > 0 for ms in bound["ms_per_step"].values())
    assert bound["mean_acceptance_length"] > 1
    assert ["step", "verify", "engine.verifier"] in [stage["path"] for stage in found["stages"]["stages"]]
    assert found["bundle"]["random_weights"] is False
    assert found["figures"] == {
        "labelled": "synthetic acceptance: speeds are real, texts are not",
        "plain_share_of_bandwidth": None, "plain_share_wanted": 0.8,
        "speculative_share_of_bound": bound["share_of_bound"],
        "speculative_share_of_bound_in_time": bound["share_of_bound_in_time"],
        "speculative_share_of_bound_accepted_on_device": bound["accepted_on_device"]["share_of_bound"],
        "speculative_share_of_bound_in_time_accepted_on_device": bound["accepted_on_device"]["share_of_bound_in_time"],
        "speculative_share_wanted": 0.9, "host_us_a_step": None, "host_us_a_step_adaptive": None,
        "host_us_wanted": 60.0, "cuda_graphs": None, "not_captured": None,
    }  # fmt: skip


@pytest.fixture
def cuda(gpu: None, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """The bundle's device is over the CUDA stand-ins, without PyTorch."""
    fakes = tensorrt_device(open_bundle(bundle, verify=False), tmp_path)
    monkeypatch.setattr(api, "open_device", lambda bundle, name, threads: fakes.device)
    monkeypatch.setattr(gpu_bench, "missing", lambda backend: None)
    monkeypatch.setattr(gpu_speed, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_bench, "cuda_version", lambda: (13, 0))
    monkeypatch.setitem(sys.modules, "torch", None)
    return fakes


def test_every_section_on_cuda_without_pytorch(
    cuda: Fakes, bundle: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the host's time for the budget, and for the sizes that the controller chooses."""
    asked: list[Budget | None] = []
    generate = Runtime.generate

    def generated(self: Runtime, *given: Any, **options: Any) -> Any:
        if isinstance(given[2], SpeculationParams) and given[2].method is None:
            asked.append(given[2].budget)
        return generate(self, *given, **options)

    monkeypatch.setattr(Runtime, "generate", generated)
    found = measure("--engines", bundle)
    expected = {"device": "Small GPU", "compute_capability": "9.0", "newest_cuda_of_driver": "13.0"}
    assert {key: found["environment"][key] for key in expected} == expected
    assert found["plain"]["copy_gb_per_second"] > 0
    assert found["plain"]["share_of_copy"] == found["figures"]["plain_share_of_bandwidth"] > 0
    assert found["figures"]["host_us_a_step"] > 0
    assert found["figures"]["host_us_a_step_adaptive"] > 0
    assert found["figures"]["cuda_graphs"] > 0
    assert found["figures"]["not_captured"] is False
    fixed = Budget(6, 2, 3)
    assert asked == [fixed, fixed, None, None, fixed]
    assert cuda.device.cuda.captured >= found["figures"]["cuda_graphs"]


@pytest.fixture
def tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No speed is measured, but its last section is there."""
    monkeypatch.setattr(
        gpu_bench, "measure_speed", lambda runtime, bundle, load, sections: sections.put("stages", load.size.nodes)
    )


@pytest.fixture
def wrong(tokens_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that writes another fourth token."""
    generate = Runtime.generate

    def generated(self: Runtime, *given: Any, **options: Any) -> Any:
        outputs = generate(self, *given, **options)
        if not self.verifier.device.step_graphs:
            return outputs
        return [replace(o, token_ids=(*o.token_ids[:3], 99, *o.token_ids[4:])) for o in outputs]

    monkeypatch.setattr(Runtime, "generate", generated)


@pytest.mark.usefixtures("wrong")
def test_a_wrong_token_is_an_error_after_all_was_written(
    bundle: Path, tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error gives the host's margin at that place, which separates a near-tie from an error."""
    out = tmp_path / "engines.json"
    for more in ((), ("--go-on",)):
        with pytest.raises(WrongTokens, match=r"onnxruntime on cpu writes .* none: prompt p1, token 3"):
            measure("--engines", bundle, "--device", "cpu", "--out", out, *more)
        found = json.loads(out.read_text())
        for method in METHODS:
            (difference,) = found["tokens"][method]["differences"]
            assert (difference["prompt"], difference["token"]) == ("p1", 3)
            assert difference["logit_margin"] > 0
            assert len(found["tokens"][method]["wrong"]) == 1
        assert {"stages", "error"} <= set(found)
    monkeypatch.setattr(gpu_bench, "NEAR_TIES", {"fp32": 1e9})
    found = measure("--engines", bundle, "--device", "cpu")["tokens"]
    assert [len(found[method]["differences"]) for method in METHODS] == [1, 1, 1]
    assert not any(found[method]["wrong"] for method in METHODS)


def labelled(bundle: Path, **changes: object) -> Any:
    """Opens the bundle under another manifest, and others unchanged."""

    def opened(path: Path, verify: bool) -> Any:
        found = open_bundle(path, verify)
        return replace(found, manifest=replace(found.manifest, **changes)) if path == bundle else found

    return opened


def test_random_weights_are_not_compared(bundle: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(open_bundle(bundle, verify=False).manifest.model, random_weights=True)
    monkeypatch.setattr(gpu_bench, "open_bundle", labelled(bundle, model=model))
    found = measure("--engines", bundle, "--device", "cpu")
    assert found["tokens"] == {"skipped": "random weights: rounding decides every token"}
    assert found["bundle"]["random_weights"] is True
    assert found["figures"]["labelled"].startswith("random weights (the verifier): ")


@pytest.mark.usefixtures("tokens_alone")
def test_engines_of_tensorrt_are_compared_with_a_reference(
    bundle: Path, tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "reference"
    shutil.copytree(bundle, other, copy_function=os.link)
    monkeypatch.setattr(gpu_bench, "open_bundle", labelled(bundle, backend="tensorrt"))
    given = ("--engines", bundle, "--device", "cpu")
    hosts, opening = [], Runtime.open

    def opened(path: Path, **options: Any) -> Runtime:
        if options.get("device") is None:
            hosts.append(path)
        return opening(path, **options)

    monkeypatch.setattr(Runtime, "open", opened)
    assert "give one of the same model as --reference" in measure(*given)["tokens"]["skipped"]
    found = measure(*given, "--reference", other)["tokens"]
    assert found["reference"] == {"bundle": str(other), "precision": "fp32"}
    assert hosts == [other]
    with pytest.raises(UsageError, match="the reference is for tensorrt"):
        measure(*given, "--reference", bundle)
    assert [found[method]["differences"] for method in METHODS] == [[], [], []]


def test_a_build_that_fails_is_an_error_in_the_report(
    tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess("", 2, stderr="a line\nredraft: error: no model 'nothing'\n")
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: failed)
    out = tmp_path / "engines.json"
    given = ("--engines", tmp_path / "none", "--device", "cpu", "--build", "nothing", "--out", out)
    with pytest.raises(BackendError, match=r"`redraft build nothing .* failed: redraft: error: no model 'nothing'"):
        measure(*given)
    assert "no model 'nothing'" in json.loads(out.read_text())["error"]
    assert "no model 'nothing'" in measure(*given, "--go-on")["error"]
    assert "not measured: BackendError: `redraft build nothing" in capsys.readouterr().err
    with pytest.raises(BundleError, match="expected an engine bundle"):  # an error is no reason to skip
        measure("--engines", tmp_path / "none", "--device", "cpu")


def test_a_reference_of_another_model_is_refused(bundle: Path) -> None:
    """The same weights under another name are the same model."""
    manifest = open_bundle(bundle, verify=False).manifest
    check_reference(manifest, replace(manifest, model=replace(manifest.model, source="elsewhere")))
    for changes in ({"weights": {"model.safetensors": "1" * 64}}, {"random_weights": True}, {"weights": {}}):
        changed: Any = changes
        with pytest.raises(UsageError, match="the reference is of another model: expected the weights of"):
            check_reference(manifest, replace(manifest, model=replace(manifest.model, **changed)))


def test_without_a_gpu_the_report_gives_the_reason(
    bundle: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> Gpu:
        raise BackendError("the CUDA driver sees no GPU")

    monkeypatch.setattr(gpu_bench, "find_gpu", no_gpu)
    assert measure("--engines", bundle) == {"skipped": "the CUDA driver sees no GPU"}
    assert gpu_bench.missing("onnxruntime") == gpu_bench.missing("tensorrt") == "the CUDA driver sees no GPU"


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(gpu_bench.missing("tensorrt") is None, reason="TensorRT is here")
def test_packages_are_checked_by_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install onnxruntime-gpu" in str(gpu_bench.missing("onnxruntime"))
    assert str(gpu_bench.missing("tensorrt")).startswith("not installed: ")
    absent: list[str] = ["tensorrt"]

    def find(name: str) -> Any:
        if name in absent and name == "cuda.bindings":
            raise ModuleNotFoundError("No module named 'cuda'")
        return None if name in absent else object()

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(gpu_bench, "execution_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert gpu_bench.missing("tensorrt") == "not installed: tensorrt"
    absent[:] = ["cuda.bindings"]
    assert gpu_bench.missing("tensorrt") == gpu_bench.missing("onnxruntime") == "not installed: cuda.bindings"
    absent.clear()
    assert gpu_bench.missing("tensorrt") is gpu_bench.missing("onnxruntime") is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (("--gpu-gib", "8.5"), "8.5 GiB of GPU memory needed, Small GPU has 8.0 free"),
        (("--disk-gib", "1e6"), "1000000.0 GiB of disk needed for the engines"),
    ],
)
def test_a_shape_that_does_not_fit_is_not_built(
    tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(gpu_bench, "missing", lambda backend: None)
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: pytest.fail("something was built"))
    given = ("--engines", tmp_path / "none", "--build", "vicuna-7b", "--backend", "onnxruntime")
    assert measure(*given, *needs)["skipped"].startswith(message)


@pytest.mark.usefixtures("tokens_alone")
def test_a_bundle_is_built_with_the_given_options(
    bundle: Path, tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def build(command: list[str], **options: Any) -> Any:
        asked.append(command)
        shutil.copytree(bundle, command[command.index("-o") + 1], copy_function=os.link)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", build)
    out = tmp_path / "built"
    given = ("--engines", out, "--device", "cpu", "--build", "vicuna-7b")
    found = measure(*given, "--backend", "onnxruntime", "--weights", "random")
    assert asked[0][1:] == ["build", "vicuna-7b", "-o", str(out), "--backend", "onnxruntime", "--weights", "random"]
    assert Path(asked[0][0]).is_file()
    assert found["tokens"]["lyanna"]["wrong"] == []
