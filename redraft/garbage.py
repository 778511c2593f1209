"""Python's garbage collector, kept from looking at large libraries: half a million objects that stay until the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def libraries_kept() -> Iterator[None]:
    """Import libraries in the block. The collector does not run in it, and never looks at what exists at its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
