"""A runtime for a command: opened as `Runtime.open` does, in a process that holds little else."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from redraft.runtime import Runtime


def open_runtime(engines: Path, **options: Any) -> Runtime:
    """Open the bundle. Options and errors are those of `Runtime.open`.

    Loaded objects stay until the process ends, so Python's garbage collector skips them. A full collection in the
    middle of a text takes as long as ten steps of a small model.
    """
    from redraft.runtime import Runtime

    runtime = Runtime.open(engines, **options)
    gc.collect()
    gc.freeze()
    return runtime
