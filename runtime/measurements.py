"""Figures measured on this machine and saved for the next opening: one JSON file for each identity."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.cpus import default_threads
from redraft.engines.tensorrt.driver import find_gpu
from redraft.errors import BackendError
from redraft.user_cache import read_object, user_cache, write_object

_LOG = logging.getLogger("redraft.costs")
Identity = Mapping[str, str | int]
"""Settings that figures depend on, apart from the machine: build, graph, threads, max_num_seqs, device …"""


def kept_file(identity: Identity) -> Path | None:
    """Return the file for figures of `identity` on this machine; None if the machine's GPU has no name.

    On the device `cuda`, the file name depends on the GPU.
    """
    try:
        return cache_folder() / f"{_key(identity)}.json"
    except BackendError:
        return None


def read_kept(path: Path | None) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, is unreadable, or holds another value."""
    return None if path is None else read_object(path)


def write_kept(path: Path | None, values: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that no reader sees a part. Logs one line if the folder is not writable."""
    if path is None:
        return
    try:
        write_object(path, values)
    except OSError as error:
        _LOG.warning("cannot save measured figures in %s: %s; every opening measures again", path.parent, error)


def cache_folder() -> Path:
    """Return the folder of measured figures."""
    return user_cache() / "curves"


def _key(identity: Identity) -> str:
    """Return a name that depends on everything that a time depends on. Raises BackendError for a GPU without a name."""
    machine = {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": default_threads().count,
        **(_gpu() if identity.get("device") == "cuda" else {}),
    }
    return hashlib.sha256(json.dumps({**identity, **machine}, sort_keys=True).encode()).hexdigest()[:32]


def _gpu() -> dict[str, object]:
    """Return the GPU that engines run on, which is the first visible one."""
    found = find_gpu()
    return {"gpu": found.name, "compute_capability": found.compute_capability}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return f"{named.get('model name', '')} {hashlib.sha256(named.get('flags', '').encode()).hexdigest()[:8]}"
    return platform.processor()
