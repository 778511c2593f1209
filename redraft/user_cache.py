"""Small files in the user's cache folder. A lost or damaged one costs time, never correctness."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """Return redraft's folder in the user's cache. It need not exist.

    A user without a home folder gets a path that cannot exist: nothing is read, and writing raises OSError.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft"
    except RuntimeError:
        return Path(os.devnull) / "redraft"


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file, it cannot be read, or it holds something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if isinstance(values := json.loads(path.read_bytes()), dict):
            return values
    return None


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write all of the file or nothing, so that no reader sees a part. Raises OSError."""
    write_bytes(path, json.dumps(values).encode())


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write all of the file or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
