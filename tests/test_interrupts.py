"""An interrupt comes after the block, and only if one was due."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from redraft.interrupts import interrupts_deferred, interrupts_repeated


@pytest.fixture(autouse=True)
def _heeded() -> Iterator[None]:
    """A job started in the background of a script ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_block_is_finished_first() -> None:
    done: list[int] = []

    def block() -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(sum(range(1000)))

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with interrupts_deferred():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_are_left_alone() -> None:
    found: list[object] = []

    def block() -> None:
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    class Closing:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    def block() -> None:
        with interrupts_repeated():
            closing = Closing()
            del closing
            for _ in range(200):
                time.sleep(0.02)

    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        block()
    assert sys.unraisablehook is before


def test_other_ignored_errors_are_reported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError("in a destructor")

    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: reported.append(ignored.exc_value))
    with interrupts_repeated():
        failing = Failing()
        del failing
    assert [str(error) for error in reported] == ["in a destructor"]
