"""Interrupts (Ctrl-C) that wait until a block ends, or are raised again when Python ignored them."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

REPEAT_S = 0.01


@contextmanager
def interrupts_deferred() -> Iterator[list[int]]:
    """Hold interrupts back until the block ends, then raise KeyboardInterrupt. Yields the signals received so far.

    For C++ that calls Python: an exception while a library loads crashes the process, and C++ drops an exception of a
    callback. Does nothing outside the main thread, since Python interrupts only that one.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)
        if signals and before is not signal.SIG_IGN:
            raise KeyboardInterrupt


@contextmanager
def interrupts_repeated() -> Iterator[None]:
    """Repeat an interrupt that Python ignored inside the block, until one is raised.

    Python reports and ignores exceptions in destructors and in callbacks of the garbage collector, so the command would
    continue. A moment later the program runs other code, which an interrupt does stop.
    """
    before = sys.unraisablehook

    def interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            threading.Timer(REPEAT_S, _thread.interrupt_main).start()
        else:
            before(ignored)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = before
