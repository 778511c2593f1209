"""The end of any command: statuses, tracebacks only on request, `redraft doctor`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.little import Redraft

from redraft.cli import doctor, main
from redraft.cli.console import Finding
from redraft.errors import BackendError


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


def test_no_command_shows_help_and_fails(redraft: Redraft) -> None:
    result = redraft()
    assert result.returncode == 2
    assert "Usage: redraft" in result.stdout + result.stderr


def test_unknown_command(redraft: Redraft) -> None:
    result = redraft("conjure")
    assert result.returncode == 2
    assert result.stderr.startswith("redraft: error: No such command 'conjure'")


def test_version(redraft: Redraft) -> None:
    assert redraft("--version").stdout.startswith("redraft 0.")


def test_defect_is_one_line_and_its_traceback_comes_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a\ndefect")

    monkeypatch.setattr(main, "app", broken)
    monkeypatch.delenv("REDRAFT_DEBUG", raising=False)
    assert main.run([]) == 1
    assert capsys.readouterr().err.startswith("redraft: error: unexpected ZeroDivisionError: a defect; run again with")
    monkeypatch.setenv("REDRAFT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main.run([])


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> list[Finding]:
        raise KeyboardInterrupt

    monkeypatch.setattr("redraft.cli.doctor.examine", interrupted)
    assert main.run(["doctor"]) == 130
    assert capsys.readouterr().err == "redraft: error: interrupted\n"


def test_doctor_finds_the_cpu_path_working(redraft: Redraft) -> None:
    result = redraft("doctor", "--json")
    found = json.loads(result.stdout)
    names = {finding["name"] for finding in found["findings"]}
    assert result.returncode == 0
    assert found["cpu_path_works"] is True
    parts = {"python", "onnxruntime", "processor", "memory", "disk", "cache folder", "GPU", "TensorRT"}
    assert parts | {"TensorRT plugin"} <= names


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
