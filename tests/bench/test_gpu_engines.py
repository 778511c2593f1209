"""The GPU measurement of engines, over the device path on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.devices import Fakes, cpu_device, open_over, tensorrt_device
from tests.runtime.lyanna_bundle import CONTEXT

from redraft import names
from redraft.bench import gpu_device, gpu_engines
from redraft.bench.compare import Run
from redraft.bench.prompts import Prompt
from redraft.bench.roofline import traffic
from redraft.engines import open_bundle
from redraft.engines.tensorrt.driver import Gpu
from redraft.errors import BackendError, BundleError, UsageError
from redraft.runtime import Generation, Runtime, api, device_verifier
from redraft.runtime.metrics import Metrics
from redraft.runtime.synthetic import Acceptance
from redraft.types import Budget, Costs

OPTIONS = ("--max-new-tokens", "12", "--budget", "nodes=6,depth=2,width=3")
METHODS = ("none", "ngram", "lyanna")
GPU = Gpu("Small GPU", (9, 0), 8 << 30, 9 << 30)


@pytest.fixture
def bundle(lyanna_bundle: Path) -> Path:
    return lyanna_bundle


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
    same = {"prompts": 1, "differences": [], "wrong": []}
    assert {method: found["tokens"][method] for method in METHODS} == dict.fromkeys(METHODS, same)
    assert found["tokens"]["reference"] == {"bundle": str(bundle), "precision": "fp32"}
    assert set(found["curve"]["ms"]) == {"1", "2", "4", "8", "13", "16", "32", "64"}
    assert all(ms > 0 for ms in found["curve"]["ms"].values())
    assert found["curve"]["live"] == CONTEXT - 1
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
        "speculative_share_of_bound_judged_on_device": bound["judged_on_device"]["share_of_bound"],
        "speculative_share_of_bound_in_time_judged_on_device": bound["judged_on_device"]["share_of_bound_in_time"],
        "speculative_share_wanted": 0.9, "host_us_a_step": None, "host_us_a_step_adaptive": None,
        "host_us_wanted": 60.0, "cuda_graphs": None, "not_captured": None,
    }  # fmt: skip


@pytest.fixture
def cuda(bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """The bundle's device is one over the fakes of CUDA, and there is no PyTorch."""
    fakes = tensorrt_device(open_bundle(bundle, verify=False), tmp_path)
    monkeypatch.setattr(api, "open_device", lambda bundle, name, threads: fakes.device)
    monkeypatch.setattr(gpu_engines, "missing", lambda backend: None)
    monkeypatch.setattr(gpu_engines, "COPY_BYTES", 1 << 20)
    for module in (gpu_engines, gpu_device):
        monkeypatch.setattr(module, "find_gpu", lambda: GPU)
    monkeypatch.setattr(gpu_device, "cuda_version", lambda: (13, 0))
    monkeypatch.setitem(sys.modules, "torch", None)
    return fakes


def test_every_section_on_cuda_without_pytorch(
    cuda: Fakes, bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's time is that of the budget, and of the sizes that the controller chooses."""
    asked: list[Budget | None] = []
    generate = Runtime.generate

    def generated(self: Runtime, *given: Any, **options: Any) -> Any:
        if given[2] is None:
            asked.append(given[3])
        return generate(self, *given, **options)

    monkeypatch.setattr(Runtime, "generate", generated)
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts)
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


@pytest.mark.parametrize("size", [Budget(6, 2, 3), None], ids=["budget", "adaptive"])
def test_the_hosts_time_is_what_it_does_not_wait_for(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: Budget | None
) -> None:
    """On a clock that stands still but for a wait, which takes a second, and for the device, where work takes two."""
    now = [0.0]
    fakes = tensorrt_device(open_bundle(bundle, verify=False), tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(api, "cached_costs", lambda verifier, drafter, identity: Costs())
    with open_over(fakes.device, bundle) as runtime:
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        wait, fill = fakes.device.wait, device_verifier.TreeFrame.fill

        def waited() -> None:
            wait()
            now[0] += 1.0

        def filled(*given: Any) -> None:
            fill(*given)
            now[0] += 20e-6

        monkeypatch.setattr(fakes.device, "wait", waited)
        monkeypatch.setattr(device_verifier.TreeFrame, "fill", filled)
        options = SimpleNamespace(max_new_tokens=12)
        found = gpu_engines.host_us(runtime, Prompt("one", "letters", "abcd"), options, size)  # type: ignore[arg-type]
    assert found == pytest.approx(20, rel=1e-3)


# --- figures ---------------------------------------------------------------------------------------------------------


def generation(tokens: int, per_second: float, accepted: int = 0, sizes: tuple[int, ...] = ()) -> Generation:
    """`tokens` tokens, the first of which the prompt gave."""
    steps = tokens - 1 - accepted
    total = (tokens - 1) / per_second * 1e3
    metrics = Metrics(steps, 0, 0, accepted, 0.0, 0.0, (), per_second, 0.0, 0.0,
                      {"draft": 0.0, "resample": 0.0, "verify": 0.0, "host": total}, size_histogram=sizes)  # fmt: skip
    return Generation("", (0,) * tokens, "length", 20, metrics)


def test_plain_decoding_is_held_against_the_bytes_of_its_whole_step(bundle: Path) -> None:
    """A step of 4 ms whose verification alone takes 2: half the share. 40 rows are live in the middle of a text."""
    opened = open_bundle(bundle, verify=False)
    runs = [Run(Prompt("p", "letters", "abcd"), {"none": generation(41, 250.0)})]
    found = gpu_engines.plain_share(opened, runs, 2.0, 1e9)
    step, alone = (traffic(opened, names.VERIFIER, 1, live).total for live in (40, CONTEXT - 1))
    assert step < alone
    assert (found["ms"], found["verification_ms"], found["live"]) == (4.0, 2.0, 40)
    assert found["bytes"] == step
    assert found["share_of_copy"] == pytest.approx(step / 4e-3 / 1e9)
    assert found["verification_share_of_copy"] == pytest.approx(alone / 2e-3 / 1e9)
    assert found["copy_gb_per_second"] == 1.0


def test_the_bound_is_held_against_both_ways_to_judge() -> None:
    """60 tokens in 20 steps; plain decoding 4 ms a token; t(1) = 3 ms, t(4) = 5: at most 3 * 3 / 5 = 1.8 times plain.

    The runs take 8 ms a step, 1.5 times plain; steps judged on the device 7.5 ms, 1.6 times plain. Plain decoding that
    is slower than t(1) flatters these; of the time alone, 5 of 8 ms are the bound's.
    """
    sizes = (0, 0, 0, 0, 20)
    generations = {"none": generation(61, 250.0), "ngram": generation(61, 375.0, accepted=40, sizes=sizes)}
    runs = [Run(Prompt("p", "letters", "abcd"), generations)]
    found = gpu_engines.bounded(runs, [0.0, 3.0, 4.0, 4.5, 5.0], {"host": 8.1, "device": 7.5}, (0.9, 0.8))
    assert found["bound"] == pytest.approx(1.8)
    assert found["share_of_bound"] == pytest.approx(1.5 / 1.8)
    assert found["share_of_bound_in_time"] == pytest.approx(5 / 8)
    assert found["judged_on_device"] == pytest.approx(
        {"overall_speedup": 1.6, "share_of_bound": 1.6 / 1.8, "share_of_bound_in_time": 5 / 7.5}
    )
    assert found["ms_per_step"] == pytest.approx(
        {"plain": 4.0, "bound": 5.0, "runs": 8.0, "judged_on_host": 8.1, "judged_on_device": 7.5}
    )


@pytest.mark.parametrize("kind", ["cpu", "tensorrt"])
def test_both_ways_to_judge_are_timed_over_whole_trees(
    kind: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that takes a second more to judge is seen in its own figure only; steps end before trees must be cut."""
    opened = open_bundle(bundle, verify=False)
    device = cpu_device(opened) if kind == "cpu" else tensorrt_device(opened, tmp_path).device
    judged, read = device_verifier._judge, []
    seconds = iter(range(10**6))

    def slow(*given: Any) -> Any:
        read.append([len(tree) for tree in given[2]])
        return [next(seconds) for _ in range(1000)] and judged(*given)

    with open_over(device, bundle) as runtime:
        monkeypatch.setattr(device_verifier, "_judge", slow)
        monkeypatch.setattr(time, "perf_counter", lambda: next(seconds) * 1e-3)
        near_the_end = Prompt("long", "letters", "abcd" * 18)
        found = gpu_engines.judged_ms(runtime, near_the_end, Budget(6, 2, 3), Acceptance((0.9, 0.8)))
    assert found["host"] > 1000 > found["device"] > 0
    assert read
    assert all(sizes == [7] for sizes in read)


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says another fourth token."""
    generate = Runtime.generate

    def generated(self: Runtime, *given: Any, **options: Any) -> Any:
        outputs = generate(self, *given, **options)
        if self.verifier.device is None:
            return outputs
        return [replace(o, token_ids=(*o.token_ids[:3], 99, *o.token_ids[4:])) for o in outputs]

    monkeypatch.setattr(Runtime, "generate", generated)


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("more", [(), ("--go-on",)])
def test_a_wrong_token_is_an_error_after_all_was_written(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """With the host's lead at that place, which tells a near-tie from an error."""
    out = tmp_path / "engines.json"
    with pytest.raises(gpu_engines.WrongTokens, match=r"onnxruntime on cpu says .* none: prompt p1, token 3"):
        run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu", "--out", out, *more)
    found = json.loads(out.read_text())
    for method in METHODS:
        (difference,) = found["tokens"][method]["differences"]
        assert (difference["prompt"], difference["token"]) == ("p1", 3)
        assert difference["gap"] > 0
        assert len(found["tokens"][method]["wrong"]) == 1
    assert {"figures", "stages", "error"} <= set(found)


@pytest.mark.usefixtures("wrong")
def test_a_near_tie_is_said_and_is_no_error(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "NEAR_TIES", {"fp32": 1e9})
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu")["tokens"]
    assert [len(found[method]["differences"]) for method in METHODS] == [1, 1, 1]
    assert all(not found[method]["wrong"] for method in METHODS)


def labelled(bundle: Path, **changes: object) -> Any:
    """Opens the bundle under another manifest, and others as they are."""

    def opened(path: Path, verify: bool) -> Any:
        found = open_bundle(path, verify)
        return replace(found, manifest=replace(found.manifest, **changes)) if path == bundle else found

    return opened


def test_random_weights_are_not_compared(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(open_bundle(bundle, verify=False).manifest.model, random_weights=True)
    monkeypatch.setattr(gpu_engines, "open_bundle", labelled(bundle, model=model))
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts, "--device", "cpu")
    assert found["tokens"] == {"skipped": "random weights: rounding decides every token"}
    assert found["bundle"]["random_weights"] is True
    assert found["figures"]["labelled"].startswith("random weights (the verifier): ")


def test_engines_of_tensorrt_are_compared_with_a_reference(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "reference"
    shutil.copytree(bundle, other, copy_function=os.link)
    monkeypatch.setattr(gpu_engines, "open_bundle", labelled(bundle, backend="tensorrt"))
    given = ("--engines", bundle, "--prompts", prompts, "--device", "cpu")
    hosts, opening = [], Runtime.open

    def opened(path: Path, **options: Any) -> Runtime:
        if options.get("device") is None:
            hosts.append(path)
        return opening(path, **options)

    monkeypatch.setattr(Runtime, "open", opened)
    assert "give one of the same model as --reference" in run(monkeypatch, *given)["tokens"]["skipped"]
    found = run(monkeypatch, *given, "--reference", other)["tokens"]
    assert found["reference"] == {"bundle": str(other), "precision": "fp32"}
    assert hosts == [other]
    with pytest.raises(UsageError, match="the reference is for tensorrt"):
        run(monkeypatch, *given, "--reference", bundle)
    assert [found[method]["differences"] for method in METHODS] == [[], [], []]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"model.safetensors": "1" * 64}}, "the reference is of another model: expected the weights of"),
        ({"random_weights": True}, "the reference is of another model"),
        ({"weights": {}}, "the reference is of another model"),
        ({"source": "elsewhere"}, None),
    ],
)
def test_a_reference_of_another_model_is_refused(bundle: Path, changes: dict[str, Any], message: str | None) -> None:
    """The same weights under another name are the same model."""
    manifest = open_bundle(bundle, verify=False).manifest
    other = replace(manifest, model=replace(manifest.model, **changes))
    if message is None:
        gpu_engines.check_reference(manifest, other)
        return
    with pytest.raises(UsageError, match=message):
        gpu_engines.check_reference(manifest, other)


def test_a_reference_that_the_host_cannot_run_is_refused(bundle: Path) -> None:
    manifest = open_bundle(bundle, verify=False).manifest
    with pytest.raises(UsageError, match="the reference is for tensorrt"):
        gpu_engines.check_reference(manifest, replace(manifest, backend="tensorrt"))


# --- what is missing -------------------------------------------------------------------------------------------------


def no_gpu() -> Gpu:
    raise BackendError("the CUDA driver sees no GPU")


def test_without_a_device_the_report_says_why(bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "find_gpu", no_gpu)
    found = run(monkeypatch, "--engines", bundle, "--prompts", prompts)
    assert found == {"skipped": "the CUDA driver sees no GPU"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is here, with 8 GiB of its memory free."""
    monkeypatch.setattr(gpu_engines, "find_gpu", lambda: GPU)


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(gpu_engines.missing("tensorrt") is None, reason="TensorRT is here")
def test_what_runs_engines_is_asked_for_by_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install onnxruntime-gpu" in str(gpu_engines.missing("onnxruntime"))
    assert str(gpu_engines.missing("tensorrt")).startswith("not installed: ")
    present = importlib.util.find_spec("json")
    for absent in ("tensorrt", "polygraphy", "cuda.bindings"):
        spec = lambda name, absent=absent: None if name == absent else present  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", spec)
        assert gpu_engines.missing("tensorrt") == f"not installed: {absent}"

    def without_cuda(name: str) -> Any:
        if name == "cuda.bindings":
            raise ModuleNotFoundError("No module named 'cuda'")
        return present

    monkeypatch.setattr(importlib.util, "find_spec", without_cuda)
    assert gpu_engines.missing("tensorrt") == "not installed: cuda.bindings"
    monkeypatch.setattr(gpu_engines, "execution_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert gpu_engines.missing("onnxruntime") == "not installed: cuda.bindings"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: present)
    assert gpu_engines.missing("tensorrt") is None
    assert gpu_engines.missing("onnxruntime") is None


def test_without_a_gpu_no_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "find_gpu", no_gpu)
    assert gpu_engines.missing("onnxruntime") == gpu_engines.missing("tensorrt") == "the CUDA driver sees no GPU"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (("--gpu-gib", "8.5"), "8.5 GiB of GPU memory needed, Small GPU has 8.0 free"),
        (("--disk-gib", "1e6"), "1000000.0 GiB of disk needed for the engines"),
    ],
)
def test_a_shape_that_does_not_fit_is_not_built(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(gpu_engines, "missing", lambda backend: None)
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: pytest.fail("something was built"))
    given = ("--engines", tmp_path / "none", "--prompts", prompts, "--build", "vicuna-7b", "--backend", "onnxruntime")
    found = run(monkeypatch, *given, *needs)
    assert found["skipped"].startswith(message)


def test_a_bundle_is_built_with_what_was_asked_for(
    bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def build(command: list[str], **options: Any) -> Any:
        asked.append(command)
        shutil.copytree(bundle, command[command.index("-o") + 1], copy_function=os.link)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", build)
    out = tmp_path / "built"
    given = ("--engines", out, "--prompts", prompts, "--device", "cpu", "--build", "vicuna-7b")
    found = run(monkeypatch, *given, "--backend", "onnxruntime", "--weights", "random")
    assert asked[0][1:] == ["build", "vicuna-7b", "-o", str(out), "--backend", "onnxruntime", "--weights", "random"]
    assert Path(asked[0][0]).is_file()
    assert found["bound"]["mean_acceptance_length"] > 1


def test_a_build_that_fails_is_an_error_in_the_report(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engines.json"
    given = (
        "--engines",
        tmp_path / "none",
        "--prompts",
        prompts,
        "--device",
        "cpu",
        "--build",
        "nothing",
        "--out",
        out,
    )
    with pytest.raises(BackendError, match=r"`redraft build nothing .* failed: redraft: error: no model 'nothing'"):
        run(monkeypatch, *given)
    assert "no model 'nothing'" in json.loads(out.read_text())["error"]
    found = run(monkeypatch, *given, "--go-on")
    assert "no model 'nothing'" in found["error"]
    assert "not measured: BackendError: `redraft build nothing" in capsys.readouterr().err


def test_an_error_is_no_reason_to_skip(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="expected an engine bundle"):
        run(monkeypatch, "--engines", tmp_path / "none", "--prompts", prompts, "--device", "cpu")
