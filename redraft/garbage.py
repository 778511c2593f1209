"""Freed memory: large libraries that the collector never looks at, and pages that the C library would keep."""

from __future__ import annotations

import ctypes
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


def return_memory() -> None:
    """Return freed pages to the system. glibc keeps gigabytes of a large engine that was closed."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
