"""Versions of what is installed and what to ask pip for, where one package may stand in for another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

GPU_BUILDS: Mapping[str, str] = {"onnxruntime": "onnxruntime-gpu"}
"""Builds for a GPU, which do as well in place of a requirement. They write the same files: there may be one only."""


def package_version(name: str) -> str | None:
    """The installed version of a package, or of what comes in its place; None where there is neither."""
    for found in (name, GPU_BUILDS.get(name)):
        if found is not None:
            try:
                return metadata.version(found)
            except metadata.PackageNotFoundError:
                continue
    return None


def gpu_requirement(name: str, version: str | None) -> str:
    """What to ask pip for to have a package's build for a GPU, with CUDA's libraries; None takes any version."""
    return f"{GPU_BUILDS[name]}[cuda,cudnn]" + (f"=={version}" if version else "")
