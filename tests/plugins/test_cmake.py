"""Libraries that a machine cannot build are skipped with a line and without failure; wrong settings are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import cmake

NOWHERE = "/nonexistent/compiler"
MOST_SPILLED = 100


def test_missing_nvcc_and_headers_are_reported(root: Path, tmp_path: Path) -> None:
    """Headers are missing unless they are in the named folder."""
    cmake.compiler()
    done = cmake.configure(root, tmp_path, "REDRAFT_CPU=OFF", CUDACXX=NOWHERE)
    assert done.returncode == 0, done.stderr
    kernels, plugin = cmake.summary(tmp_path)
    assert kernels.startswith("skipped  libredraft_kernels.so: nvcc was not found, install the CUDA toolkit")
    assert plugin.startswith("skipped  libredraft_tensorrt.so: nvcc was not found")
    if not [*Path("/usr/include").glob("**/NvInferRuntime.h"), *Path("/usr/local/tensorrt").glob("include/*.h")]:
        assert "make plugins TENSORRT_ROOT=dir" in plugin
    settings = ("REDRAFT_CPU=OFF", f"TENSORRT_ROOT={tmp_path}")
    done = cmake.configure(root, tmp_path, *settings, CUDACXX=NOWHERE)
    assert done.returncode != 0
    assert f"expected a folder that has include/NvInferRuntime.h, found {tmp_path}" in " ".join(done.stderr.split())
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "NvInferRuntime.h").touch()
    (tmp_path / "include" / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 10 // major\n")
    assert cmake.configure(root, tmp_path, *settings, CUDACXX=NOWHERE).returncode == 0
    assert "NvInferRuntime.h" not in cmake.summary(tmp_path)[1]


def test_an_unknown_architecture_is_refused(root: Path, tmp_path: Path) -> None:
    cmake.nvcc()
    done = cmake.configure(root, tmp_path, "REDRAFT_CPU=OFF", "REDRAFT_ARCHITECTURES=90 47")
    assert done.returncode != 0
    assert 'found "47"' in " ".join(done.stderr.split())


def test_kernels_are_for_the_gpus_that_are_here(root: Path, tmp_path: Path) -> None:
    """If nvidia-smi names no GPU that nvcc knows, kernels are built for all."""
    cmake.nvcc()
    for says, expected in (
        ("printf '9.0\\n8.0\\n9.0\\n'", "sm_80 sm_90 compute_90"),
        ("printf '4.7\\n'", "sm_80 sm_86 "),
        ("echo 'NVML library version: 535.161'; exit 18", "sm_80 sm_86 "),
    ):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        done = cmake.configure(root, tmp_path, "REDRAFT_CPU=OFF", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        assert done.returncode == 0, done.stderr
        assert f"[[{expected}" in (tmp_path / "summary.cmake").read_text()


def test_settings_of_kernels_persist(root: Path) -> None:
    """Without this, a test on a GPU would compile again, for all GPUs, and without TensorRT's headers."""
    say = ("ARCHITECTURES=90", "TENSORRT_ROOT=/headers")
    command = ["make", "-C", root, "-n", "-o", "install", "test-gpu"]
    clean = {"PATH": os.environ["PATH"]}
    given, default = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True, env=clean).stdout
        for more in (say, ())
    )
    assert '-DREDRAFT_ARCHITECTURES="90"' in given
    assert '-DTENSORRT_ROOT="/headers"' in given
    assert "-DREDRAFT_ARCHITECTURES" not in default
    assert "-DTENSORRT_ROOT" not in default


def test_without_a_compiler_make_continues_with_a_line(root: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "plugins", tmp_path / "plugins")
    command = ["make", "-C", tmp_path, "-o", f"{sys.prefix}/installed", f"VENV={sys.prefix}"]
    for target, library in (("kernels-cpu", "kernels_cpu"), ("operators", "operators")):
        environment = {"PATH": "/usr/bin:/bin", "CXX": NOWHERE}
        done = subprocess.run([*command, target], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert f"skipped  libredraft_{library}.so: no C++ compiler was found, install g++" in done.stdout


def test_cpu_kernels_export_the_c_entries_only(root: Path) -> None:
    library = root / "build" / "plugins" / "libredraft_kernels_cpu.so"
    if not library.exists() or not shutil.which("nm"):
        pytest.skip("no build/plugins/libredraft_kernels_cpu.so (make kernels-cpu), or no nm")
    done = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert "redraft_tree_attention" in names
    assert all(name.startswith("redraft_") for name in names)


def test_the_compilers_report_in_the_documentation_is_of_these_sources(root: Path) -> None:
    """A change of a kernel needs a new report: `make plugins ARCHITECTURES=90`, then experiments.kernels.compiled."""
    report = json.loads((root / "docs/gpu/kernels_sm90.json").read_text())
    assert report["sources"] == cmake.sources_digest(root)
    for kernel in report["kernels"]:
        # What comes from the caches is loaded 16 bytes at a time, and a kernel is fed by tensor cores.
        counts = kernel["instructions"]
        assert [name for name in counts if name.startswith("LDGSTS")] == ["LDGSTS 16"]
        assert counts["HMMA"] > 0
        assert kernel["spilled_bytes"] <= MOST_SPILLED
