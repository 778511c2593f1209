"""Versions of installed packages, and pip requirements, if one package may replace another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

GPU_BUILDS: Mapping[str, str] = {"onnxruntime": "onnxruntime-gpu"}
"""GPU builds that replace a requirement. Both write the same files, so install only one of them."""


def package_version(name: str) -> str | None:
    """Return the installed version of a package or of its GPU build, or None if neither is installed."""
    for found in (name, GPU_BUILDS.get(name)):
        if found is not None:
            try:
                return metadata.version(found)
            except metadata.PackageNotFoundError:
                continue
    return None


def gpu_requirement(name: str, version: str | None) -> str:
    """Return pip's requirement for a package's GPU build with CUDA's libraries. A version of None takes any."""
    return f"{GPU_BUILDS[name]}[cuda,cudnn]" + (f"=={version}" if version else "")
