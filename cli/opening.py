"""A runtime for a command: opened as `Runtime.open` does, in a process that has nothing else to keep tidy."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from redraft.runtime import Runtime


def open_runtime(engines: Path, **options: Any) -> Runtime:
    """Open the bundle; the options are those of `Runtime.open`, which says what it raises.

    What is loaded by then stays until the process ends, so Python's garbage collector need not look at it again: a full
    collection in the middle of a text takes as long as ten steps of a small model.
    """
    from redraft.runtime import Runtime

    runtime = Runtime.open(engines, **options)
    gc.collect()
    gc.freeze()
    return runtime
