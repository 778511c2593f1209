"""An interrupt comes after the block, and only where one would have come."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from redraft.cli.interrupts import interrupts_deferred


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


def test_what_is_ignored_stays_ignored() -> None:
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
