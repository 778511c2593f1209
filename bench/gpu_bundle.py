"""The bundle that is measured on a GPU: what is missing here to run it, and building it."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from redraft.bench.environment import execution_providers
from redraft.config import Backend
from redraft.engines import open_bundle
from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError
from redraft.packages import gpu_requirement, package_version

_PACKAGES: Mapping[Backend, tuple[str, ...]] = {
    "onnxruntime": ("cuda.bindings",), "tensorrt": ("tensorrt", "polygraphy", "cuda.bindings"),
}  # fmt: skip
"""What builds engines and runs them, beside ONNX Runtime itself."""
_GIB = 1 << 30


def missing(backend: Backend) -> str | None:
    """What is not here to run a backend's engines on a GPU, or None. What is here and fails is not missing."""
    if reason := _without_gpu():
        return reason
    if backend == "onnxruntime" and "CUDAExecutionProvider" not in (found := execution_providers()):
        wanted = gpu_requirement("onnxruntime", package_version("onnxruntime"))
        return f"ONNX Runtime runs on {', '.join(found)}; install {wanted} in its place"
    absent = [package for package in _PACKAGES[backend] if not _is_installed(package)]
    return f"not installed: {', '.join(absent)}" if absent else None


def _without_gpu() -> str | None:
    """What the driver says where there is no GPU."""
    try:
        find_gpu()
    except BackendError as error:
        return str(error)
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def missing_for(options: argparse.Namespace) -> str | None:
    """What is not here of the device, backend, memory and disk that the command's options ask for, or None."""
    if options.device != "cuda":
        return None
    if reason := _without_gpu():
        return reason
    backend: Backend = options.backend or open_bundle(options.engines, verify=False).manifest.backend
    if reason := missing(backend):
        return reason
    gpu = find_gpu()
    if gpu.free_bytes < options.gpu_gib * _GIB:
        return f"{options.gpu_gib} GiB of GPU memory needed, {gpu.name} has {gpu.free_bytes / _GIB:.1f} free"
    there = next(folder for folder in (options.engines, *options.engines.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free / _GIB
    if options.build and not options.engines.is_dir() and free < options.disk_gib:
        return f"{options.disk_gib} GiB of disk needed for the engines, {free:.1f} free"
    return None


def build(options: argparse.Namespace) -> None:
    """`redraft build`, which does nothing where the bundle is current. Raises BackendError with its last line."""
    command = [str(Path(sys.executable).parent / "redraft"), "build", options.build, "-o", str(options.engines)]
    for name in ("backend", "weights", "precision", "max_model_len", "drafter"):
        command += [f"--{name}", str(value)] if (value := getattr(options, name)) is not None else []
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BackendError(f"`{' '.join(['redraft', *command[1:]])}` failed: {lines[-1]}")
