"""Refuse a build that does not fit on the disk. Each engine has its own copy of the weights, also of linked ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from redraft.errors import BackendError

_GIB = 1 << 30


def check_disk(files: str, sizes: Mapping[str, int], folder: Path) -> None:
    """Raise BackendError if the disk of `folder` has less than these bytes by graph. `files` names the files."""
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed <= free:
        return
    parts = ", ".join(f"{graph} {size / _GIB:.2f}" for graph, size in sizes.items())
    raise BackendError(
        f"{files} take at least {needed / _GIB:.2f} GiB of disk, {free / _GIB:.2f} are free in {folder.parent} "
        f"(GiB: {parts})",
        "free some, or build with -o on another disk",
    )
