"""CMake as the Makefile calls it, for tests of its builds."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.prefix) / "bin"
HEADERS_FROM = "TENSORRT_ROOT"


def configure(root: Path, folder: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Configure `plugins/` in `folder`, with its libraries in it too. `settings` are like NAME=value."""
    for tool in ("cmake", "ninja"):
        if not (TOOLS / tool).exists():
            pytest.skip(f"{tool} is not in {TOOLS}: make install")
    command = [TOOLS / "cmake", "-S", root / "plugins", "-B", folder, "-G", "Ninja"]
    command += [f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}", f"-DREDRAFT_OUTPUT={folder}"]
    command += [f"-D{setting}" for setting in settings]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def build(folder: Path) -> None:
    """Build the configured folder; a failure shows the compiler's output."""
    done = subprocess.run([TOOLS / "cmake", "--build", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def summary(folder: Path) -> list[str]:
    """Return the lines on built and skipped libraries."""
    done = subprocess.run([TOOLS / "cmake", "-P", folder / "summary.cmake"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def compiler() -> None:
    """Skip without a C++ compiler."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler: install g++")


def nvcc() -> None:
    """Skip without the CUDA toolkit."""
    compiler()
    if not (os.environ.get("CUDACXX") or shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists()):
        pytest.skip("no nvcc: install the CUDA toolkit")


def tensorrt_headers() -> str:
    """Return the folder that has TensorRT's include/; skips without one."""
    nvcc()
    if not (folder := os.environ.get(HEADERS_FROM)):
        pytest.skip(f"no headers of TensorRT: name the folder that has their include/ in {HEADERS_FROM}")
    return folder


def sources_digest(root: Path) -> str:
    """Return a digest of the sources that the attention kernels are compiled from."""
    files = sorted((root / "plugins/tree_attention").glob("*.cu*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
