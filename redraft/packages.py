"""Versions of installed packages, and pip requirements, if one package may replace another."""

from __future__ import annotations

import re
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


def extra_of(module: str) -> str | None:
    """Return the first of redraft's extras that installs a module's package; None if none does, or by another name."""
    wanted = _plain(module.partition(".")[0])
    for requirement in metadata.requires("redraft") or ():
        pin, _, marker = requirement.partition(";")
        if _plain(re.split(r"[^\w.-]", pin.strip(), maxsplit=1)[0]) == wanted and "extra ==" in marker:
            return marker.partition("extra ==")[2].strip(" \"'")
    return None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def gpu_requirement(name: str, version: str | None) -> str:
    """Return pip's requirement for a package's GPU build with CUDA's libraries. A version of None takes any."""
    return f"{GPU_BUILDS[name]}[cuda,cudnn]" + (f"=={version}" if version else "")
