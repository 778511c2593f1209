"""`redraft doctor`: what works on this machine; with `--engines`, exactness of texts and costs of verification."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

from redraft.cli import doctor, doctor_engines, main
from redraft.cli.console import Finding
from redraft.errors import BackendError
from redraft.plugins import operators
from redraft.plugins.operators import OFF, OPERATORS_VARIABLE, Operators
from redraft.runtime.steps.exactness import Exactness


def test_doctor_shows_the_size_of_the_engine_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are as large as a model; those that a bundle also has take no space."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor._engine_cache().found == f"none in {tmp_path / 'redraft' / 'tensorrt'}"
    cache = tmp_path / "redraft" / "tensorrt"
    cache.mkdir(parents=True)
    for name in ("a", "b"):
        (cache / f"{name}.engine").write_bytes(bytes(200_000_000))
    os.link(cache / "b.engine", tmp_path / "verifier.engine")
    finding = next(finding for finding in doctor.examine() if finding.name == "engine cache")
    assert re.fullmatch(
        rf"2 engines, 0\.2 GB besides those of bundles, at most \d+\.\d GB, in {re.escape(str(cache))}", finding.found
    )


def test_doctor_finds_the_cpu_path_working(run: Run) -> None:
    found = run("doctor")
    names = {finding["name"] for finding in found["findings"]}
    assert found["cpu_path_works"] is True
    parts = {"python", "onnxruntime", "processor", "memory", "disk", "cache folder", "GPU", "TensorRT"}
    assert parts | {"TensorRT plugin"} <= names


def test_doctor_names_the_products_that_run(
    operators_library: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPERATORS_VARIABLE, str(operators_library.path))
    kernels = f"redraft's kernels, {operators_library.instruction_set}, in {operators_library.path}"
    assert doctor._kernels() == Finding("kernels on CPUs", "ok", kernels)
    monkeypatch.setenv(OPERATORS_VARIABLE, OFF)
    found = doctor._kernels()
    assert (found.status, found.found, found.hint) == ("absent", "ONNX Runtime's kernels: REDRAFT_OPERATORS=off", None)
    monkeypatch.setenv(OPERATORS_VARIABLE, str(tmp_path / "none.so"))
    assert doctor._kernels().status == "warning"
    monkeypatch.delenv(OPERATORS_VARIABLE)
    monkeypatch.setattr(operators, "BUILD", tmp_path)
    assert doctor._kernels().hint == operators.OPERATORS_HINT


def test_doctor_takes_the_cpu_build_of_a_pinned_version_and_any_version_in_a_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requires = ["numpy==2.4.6", "torch==2.13.0", "cuda-python<14,>=12.9; extra == 'cuda'", "onnx==1.0"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires)
    installed(monkeypatch, numpy="2.4.7", torch="2.13.0+cpu", cuda_python="13.4.4", onnx=None)
    found = {finding.name: finding for finding in doctor._packages()}
    assert (found["torch"].status, found["cuda-python"].status, found["onnx"].status) == ("ok", "ok", "broken")
    assert (found["numpy"].status, found["numpy"].hint) == ("warning", "expected 2.4.6; run `make install`")
    installed(monkeypatch, cuda_python="14.0")
    old = {finding.name: finding for finding in doctor._packages()}["cuda-python"]
    assert (old.status, old.hint) == ("warning", "expected <14,>=12.9; run `pip install 'redraft[cuda]'`")


def test_doctor_names_the_cuda_python_for_an_older_driver() -> None:
    assert doctor._driver((12, 4), "12.9.10").status == "ok"
    assert doctor._driver((13, 0), "12.9.10").status == "ok"
    assert doctor._driver((12, 4), None).status == "ok"
    found = doctor._driver((12, 4), "13.4.4")
    assert (found.status, found.found) == ("warning", "CUDA 12.4, which does not run cuda-python 13.4.4")
    assert found.hint == "run `pip install 'cuda-python<13'`, or install a newer driver"


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Set versions of packages, None for not installed; `_` stands for `-`."""
    real = doctor._package_version
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "_package_version", lambda name: changed[name] if name in changed else real(name))


def test_doctor_takes_the_build_for_a_gpu_in_place_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = next(finding.found for finding in doctor._packages() if finding.name == "onnxruntime")
    installed(monkeypatch, onnxruntime=None, onnxruntime_gpu=pin)
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["onnxruntime-gpu"].status == "ok"
    assert "onnxruntime" not in found
    assert list(doctor._both_builds()) == []
    installed(monkeypatch, onnxruntime=None, onnxruntime_gpu="1.0.0")
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["onnxruntime-gpu"].status == "warning"
    assert str(found["onnxruntime-gpu"].hint).endswith(f"run `pip install 'onnxruntime-gpu[cuda,cudnn]=={pin}'`")
    installed(monkeypatch, onnxruntime=None, onnxruntime_gpu=None)
    assert {finding.name: finding.status for finding in doctor._packages()}["onnxruntime"] == "broken"


def test_doctor_warns_of_two_builds_over_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write the same files: the one installed last runs, and uninstalling one breaks the other."""
    installed(monkeypatch, onnxruntime="1.31.1", onnxruntime_gpu="1.31.0")
    (finding,) = doctor._both_builds()
    assert finding in list(doctor.examine())
    assert finding.status == "warning"
    assert finding.found == "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 are both installed, over each other"
    assert finding.hint == (
        "run `pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install 'onnxruntime-gpu[cuda,cudnn]==1.31.1'` "
        "for a GPU, else `pip install onnxruntime==1.31.1`"
    )


def test_doctor_survives_the_uninstall_of_one_of_two_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty() -> list[str]:
        raise AttributeError("module 'onnxruntime' has no attribute 'get_available_providers'")

    monkeypatch.setattr(doctor, "execution_providers", empty)
    assert doctor._providers().status == "broken"


def test_doctor_gives_the_reason_if_onnxruntime_does_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(provider: str) -> None:
        raise BackendError(f"cannot start {provider}: no libcublas.so.13", "install it")

    monkeypatch.setattr("redraft.engines.onnxruntime_backend.start_provider", missing)
    found = doctor._onnxruntime_on_cuda()
    assert (found.status, found.hint) == ("absent", "install it")
    assert found.found == "cannot start CUDAExecutionProvider: no libcublas.so.13"
    monkeypatch.setattr("redraft.engines.onnxruntime_backend.start_provider", lambda provider: None)
    assert doctor._onnxruntime_on_cuda().status == "ok"


def test_doctor_fails_when_the_cpu_path_cannot_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [Finding("numpy", "broken", "not installed, expected 2", "run `make install`")]
    monkeypatch.setattr("redraft.cli.doctor.examine", lambda: broken)
    assert main.run(["doctor"]) == 1
    assert "XX  numpy                  not installed, expected 2; run `make install`" in capsys.readouterr().out


def test_a_bundle_is_exact_and_its_costs_are_shown_as_measured_and_as_believed(run: Run, bundle: Path) -> None:
    found = run("doctor", "--engines", bundle, "--max-num-seqs", 2)
    (exact,) = (finding for finding in found["findings"] if finding["name"] == "exact texts")
    assert exact["status"] == "ok"
    assert exact["found"].endswith("logits agree to the bit, however they are computed") or "as two" in exact["found"]
    costs = found["costs_ms"]
    assert set(costs) == {"measured", "believed"}
    for part in costs.values():
        assert set(part) == {"1", "2"}
        assert list(part["1"])[:3] == ["1", "2", "3"]
        assert all(0 < part["1"][n] <= part["2"][n] * 3 for n in part["1"])


def test_a_person_sees_a_table(redraft: Redraft, bundle: Path) -> None:
    shown = redraft("doctor", "--engines", bundle).stdout.splitlines()
    (heading,) = (line for line in shown if line.startswith("nodes"))
    assert heading.split() == ["nodes", "1", "sequence"]
    first = shown[shown.index(heading) + 1].split()
    assert first[0] == "1"
    assert len(first) == 3


def test_kernels_that_round_otherwise_are_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    differing = Exactness(1000, {"a tree's branch": 0.25})
    monkeypatch.setattr(doctor_engines, "measure_exactness", lambda verifier: differing)
    finding = doctor_engines.examine_engines(bundle, 1).exactness
    assert finding.status == "warning"
    assert finding.found.endswith("round otherwise for a tree's branch by up to 0.2")


def test_no_bundle_is_one_line(refused: Refused, tmp_path: Path) -> None:
    assert "expected an engine bundle" in refused("doctor", "--engines", tmp_path / "nothing", status=1)


def test_without_a_home_folder_the_cache_is_not_writable(no_home: None) -> None:
    found = doctor._cache_folder()
    assert (found.name, found.status) == ("cache folder", "warning")
    assert found.hint == "set XDG_CACHE_HOME to a folder that is"
