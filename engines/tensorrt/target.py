"""The TensorRT version and the GPU that engines are built for on this machine. An engine runs with no other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from redraft.config import NATIVE_RELEASES, Precision
from redraft.engines.tensorrt.driver import Gpu, find_gpu
from redraft.engines.tensorrt.records import TensorRtRecord
from redraft.errors import BackendError

OLDEST, NEWEST_MAJOR = (10, 9), 11
FP8_CAPABILITY = (8, 9)
NATIVE_FROM = (10, 15)
STALE_RELEASES = ((11, 1), (11, 2))
"""Releases with attention layers that were seen to read rows of a KV buffer past `kv_len`."""
PACKAGE = f"tensorrt>={OLDEST[0]}.{OLDEST[1]},<{NEWEST_MAJOR + 1}"
"""The package to install by pip."""
INSTALL = f"run `pip install '{PACKAGE}'`, or use NVIDIA's container"


@dataclass(frozen=True)
class Target:
    """`version` is TensorRT's, in full."""

    version: str
    gpu: Gpu

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version of TensorRT."""
        return parse_version(self.version)

    @property
    def compute_capability(self) -> str:
        """Like 9.0."""
        return ".".join(map(str, self.gpu.compute_capability))


def parse_version(text: str) -> tuple[int, int]:
    """Return (10, 13) of 10.13.3.9. Raises BackendError for a text that does not begin like a version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if not match:
        raise BackendError(f"TensorRT has the unknown version {text!r}", INSTALL)
    return int(match[1]), int(match[2])


def find_target(
    gpu: Callable[[], Gpu] = find_gpu, load: Callable[[str], ModuleType] = importlib.import_module
) -> Target:
    """Return the GPU and TensorRT. Raises BackendError if one is missing or the version is not supported."""
    found = gpu()
    version = str(import_tensorrt(load).__version__)
    release = parse_version(version)
    if release < OLDEST or release[0] > NEWEST_MAJOR:
        raise BackendError(f"expected TensorRT {OLDEST[0]}.{OLDEST[1]} to {NEWEST_MAJOR}.x, found {version}", INSTALL)
    return Target(version, found)


def check_precision(precision: Precision, gpu: Gpu) -> None:
    """Raise BackendError if a GPU has no kernels for this precision, before anything is built."""
    if precision == "fp8" and gpu.compute_capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (FP8_CAPABILITY, gpu.compute_capability))
        raise BackendError(
            f"fp8 weights need a GPU of compute capability {needed} or newer, found {gpu.name} of {found}",
            "build with --precision int8, or on a newer GPU",
        )


def check_native(release: tuple[int, int]) -> None:
    """Raise BackendError if this TensorRT's own layers do not compute tree attention (NATIVE_RELEASES)."""
    version = ".".join(map(str, release))
    hint = f"build with --attention plugin, or use {NATIVE_RELEASES}"
    if release < NATIVE_FROM:
        raise BackendError(f"TensorRT {version} has no KV update of its own", hint)
    if release in STALE_RELEASES:
        raise BackendError(f"TensorRT {version} may read rows of KV buffers that are not live", hint)


def import_tensorrt(load: Callable[[str], ModuleType] = importlib.import_module) -> Any:
    """Return TensorRT's Python package. Raises BackendError if it or a library of it is missing."""
    try:
        return load("tensorrt")
    except ModuleNotFoundError as error:
        raise BackendError(
            f"backend tensorrt needs the package {error.name}, which is not installed", INSTALL
        ) from None
    except (ImportError, OSError) as error:
        raise BackendError(f"TensorRT does not load: {error}", INSTALL) from None


def check_same(record: TensorRtRecord, here: Target, rebuild: str) -> None:
    """Raise BackendError if engines were built for another TensorRT or GPU than `here`. `rebuild` is the hint."""
    built = (record.version, record.gpu, record.compute_capability)
    if built != (here.version, here.gpu.name, here.compute_capability):
        raise BackendError(
            f"the engines are for TensorRT {built[0]} on {built[1]} ({built[2]}), "
            f"found TensorRT {here.version} on {here.gpu.name} ({here.compute_capability})",
            rebuild,
        )
