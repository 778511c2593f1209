"""Ctrl-C that waits until it is safe, and is not lost where nobody could hear it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_S = 0.01


@contextmanager
def interrupts_deferred() -> Iterator[list[int]]:
    """Hold an interrupt back until the block is left, and raise KeyboardInterrupt then. Yields those that came so far.

    For C++ that calls Python: an exception in the middle of loading a library ends the process with a crash, and one in
    a callback is caught and forgotten. Does nothing outside of the main thread, which alone is interrupted.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
        if came and before is not signal.SIG_IGN:
            raise KeyboardInterrupt


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """Interrupt again where an interrupt was lost inside of the block, until one is heard.

    What is raised in a destructor or a callback of the garbage collector, Python reports and ignores: the command would
    go on. A moment later the program is somewhere else.
    """
    before = sys.unraisablehook

    def interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_S, _thread.interrupt_main).start()
        else:
            before(ignored)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = before
