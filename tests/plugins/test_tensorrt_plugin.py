"""The TensorRT plugin, if its headers and nvcc exist: on the CPU build of the kernels, and in TensorRT's own registry.

TENSORRT_ROOT names the folder that has the headers' include/. The registry is that of the wheel `tensorrt-lean-cu13`,
in this interpreter or in those that REDRAFT_TENSORRT_PYTHON names, separated by colons. None of it needs a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import cmake

PYTHONS_FROM = "REDRAFT_TENSORRT_PYTHON"
pytestmark = pytest.mark.slow  # the first compilation takes long


@pytest.fixture(scope="module")
def library(root: Path) -> Path:
    """The plugin for one architecture; its build folder is kept."""
    headers = cmake.tensorrt_headers()
    folder = root / "build" / "cmake" / "test-cuda"
    settings = ("REDRAFT_CPU=OFF", "REDRAFT_ARCHITECTURES=90", f"TENSORRT_ROOT={headers}")
    done = cmake.configure(root, folder, *settings)
    assert done.returncode == 0, done.stderr
    cmake.build(folder)
    line = cmake.summary(folder)[-1]
    return folder / re.search(r"libredraft_tensorrt_\d+\.so", line)[0]


def pythons() -> list[str]:
    return os.environ.get(PYTHONS_FROM, sys.executable).split(os.pathsep)


@pytest.fixture(params=pythons())
def registry(request: pytest.FixtureRequest, library: Path) -> tuple[dict[str, Any], str, int]:
    """The content of one registry after loading the library, its log, and the major version it was built for."""
    if subprocess.run([request.param, "-c", "import tensorrt_lean"], capture_output=True).returncode != 0:
        pytest.skip(
            f"{request.param} has no tensorrt_lean: pip install tensorrt-lean-cu13, or name a Python in {PYTHONS_FROM}"
        )
    script = Path(__file__).with_name("registry.py")
    done = subprocess.run([request.param, script, library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, int(re.search(r"_(\d+)\.so", library.name)[1])


def test_enqueue_and_checks_on_the_cpu(root: Path) -> None:
    headers = cmake.tensorrt_headers()
    folder = root / "build" / "cmake" / "test-cpu"
    done = cmake.configure(root, folder, "REDRAFT_CUDA=OFF", "REDRAFT_TESTS=ON", f"TENSORRT_ROOT={headers}")
    assert done.returncode == 0, done.stderr
    cmake.build(folder)
    ran = subprocess.run([folder / "tests" / "tensorrt_plugin_test"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_library_exports_the_called_entries_and_needs_no_tensorrt(root: Path, library: Path) -> None:
    def names(kind: str) -> set[str]:
        done = subprocess.run(["nm", "-D", kind, library], capture_output=True, text=True, check=True)
        return {line.split()[-1] for line in done.stdout.splitlines()}

    header = (root / "plugins" / "tree_attention" / "tree_attention.h").read_text()
    entries = set(re.findall(r"^REDRAFT_API .*?(redraft_\w+)\(", header, re.MULTILINE))
    assert "redraft_tree_attention" in entries
    assert names("--defined-only") == entries | {"getCreators", "setLoggerFinder"}
    outside = {name for name in names("--undefined-only") if not re.search(r"@(GLIBC|GCC)", name)}
    assert not {name for name in outside if re.search(r"nvinfer|Plugin|InferLib", name)}


def test_registry_of_the_same_major(registry: tuple[dict[str, Any], str, int]) -> None:
    found, logged, major = registry
    if found.pop("version").split(".")[0] != str(major):
        pytest.skip(f"this registry is not of TensorRT {major}")
    assert found == {
        "loaded": True,
        "registered": True,
        "fields": ["scale", "softcap", "window", "q_heads", "kv_heads"],
        "capabilities": ["PLUGIN_V3ONE_CORE", "PLUGIN_V3ONE_BUILD", "PLUGIN_V3ONE_RUNTIME"],
        "long_integers": True,
        "from_plan": True,
        "plan_without_device": False,
        "three_kv_heads": False,
        "left": False,
    }
    assert "q_heads: expected a multiple of kv_heads = 3, found 4" in logged


def test_registry_of_another_major_is_refused(registry: tuple[dict[str, Any], str, int]) -> None:
    found, logged, major = registry
    other = found["version"].split(".")[0]
    if other == str(major):
        pytest.skip(f"this registry is of TensorRT {major}, as the library is")
    assert not found["loaded"]
    assert not found["registered"]
    assert f"expected TensorRT {major}, for which this library was built, found {other}" in logged
