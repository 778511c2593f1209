"""Missing parts of a machine that measures a bundle on a GPU, and the options of its build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redraft.bench import gpu as gpu_bench
from redraft.engines.gpu import Gpu
from redraft.errors import BackendError

Measure = Callable[..., dict[str, Any]]


def no_gpu() -> Gpu:
    raise BackendError("the CUDA driver sees no GPU")


def test_without_a_gpu_the_report_gives_the_reason(
    bundle: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bench, "find_gpu", no_gpu)
    assert measure("--engines", bundle) == {"skipped": "the CUDA driver sees no GPU"}
    assert gpu_bench.missing("onnxruntime") == gpu_bench.missing("tensorrt") == "the CUDA driver sees no GPU"


@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(gpu_bench.missing("tensorrt") is None, reason="TensorRT is here")
def test_packages_are_checked_by_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "install onnxruntime-gpu" in str(gpu_bench.missing("onnxruntime"))
    assert str(gpu_bench.missing("tensorrt")).startswith("not installed: ")
    present = importlib.util.find_spec("json")
    for absent in ("tensorrt", "cuda.bindings"):
        spec = lambda name, absent=absent: None if name == absent else present  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", spec)
        assert gpu_bench.missing("tensorrt") == f"not installed: {absent}"

    def without_cuda(name: str) -> Any:
        if name == "cuda.bindings":
            raise ModuleNotFoundError("No module named 'cuda'")
        return present

    monkeypatch.setattr(importlib.util, "find_spec", without_cuda)
    assert gpu_bench.missing("tensorrt") == "not installed: cuda.bindings"
    monkeypatch.setattr(gpu_bench, "execution_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert gpu_bench.missing("onnxruntime") == "not installed: cuda.bindings"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: present)
    assert gpu_bench.missing("tensorrt") is None
    assert gpu_bench.missing("onnxruntime") is None


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
    found = measure(*given, *needs)
    assert found["skipped"].startswith(message)


def test_a_bundle_is_built_with_the_given_options(
    bundle: Path, tmp_path: Path, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    others = subprocess.run

    def build(command: list[str], **options: Any) -> Any:
        if "build" not in command:
            return others(command, **options)
        asked.append(command)
        shutil.copytree(bundle, command[command.index("-o") + 1], copy_function=os.link)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", build)
    out = tmp_path / "built"
    given = ("--engines", out, "--device", "cpu", "--build", "vicuna-7b")
    found = measure(*given, "--backend", "onnxruntime", "--weights", "random")
    assert asked[0][1:] == ["build", "vicuna-7b", "-o", str(out), "--backend", "onnxruntime", "--weights", "random"]
    assert Path(asked[0][0]).is_file()
    assert found["bound"]["mean_acceptance_length"] > 1
