"""Figures measured on this machine and kept for the next opening: one JSON file for each thing they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError
from redraft.user_cache import read_object, user_cache, write_object

_LOG = logging.getLogger("redraft.costs")
Identity = Mapping[str, str | int]
"""What figures depend on besides the machine: build, graph, threads, slots, device …"""


def kept_file(identity: Identity) -> Path | None:
    """Where figures of `identity` on this machine are kept; None for a GPU that nobody can name.

    On the device `cuda` the name depends on the machine's GPU.
    """
    try:
        return cache_folder() / f"{_key(identity)}.json"
    except BackendError:
        return None


def read_kept(path: Path | None) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, it cannot be read, or it is something else."""
    return None if path is None else read_object(path)


def write_kept(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write all or nothing, so that a reader never sees a part. Logs one line if the folder cannot be written."""
    if path is None:
        return
    try:
        write_object(path, values)
    except OSError as error:
        _LOG.warning("cannot keep what was measured in %s: %s; every opening measures again", path.parent, error)


def cache_folder() -> Path:
    """Where measured figures are kept."""
    return user_cache() / "curves"


def _key(identity: Identity) -> str:
    """Names everything that a time depends on. Raises BackendError where the device is a GPU that has no name."""
    machine = {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        **(_gpu() if identity.get("device") == "cuda" else {}),
    }
    return hashlib.sha256(json.dumps({**identity, **machine}, sort_keys=True).encode()).hexdigest()[:32]


def _gpu() -> dict[str, object]:
    """The GPU that engines run on: the first visible one."""
    found = find_gpu()
    return {"gpu": found.name, "compute_capability": found.compute_capability}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return f"{named.get('model name', '')} {hashlib.sha256(named.get('flags', '').encode()).hexdigest()[:8]}"
    return platform.processor()
