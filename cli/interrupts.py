"""Ctrl-C that waits until it is safe."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold an interrupt back until the block is left, and raise KeyboardInterrupt then.

    For loading libraries that are built in C++: an exception in the middle of it ends the process with a crash. Does
    nothing outside of the main thread, which alone is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and before is not signal.SIG_IGN:
            raise KeyboardInterrupt
