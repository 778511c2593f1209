"""A process for each decoder, which answers over a pipe. Only the process whose turn it is computes.

Libraries therefore do not share threads or memory. A worker reports the processor time between its turns, which shows
whether its idle threads spin.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from redraft.bench.command import reason_of
from redraft.bench.peers.base import Asked, Continued, Decoded, Decoder, PeerError, Server
from redraft.errors import RedraftError

LONGEST_SECONDS = 3600.0
"""A worker that takes longer for an answer has failed."""
Opener = Callable[[], Decoder | Server]
"""Opens a decoder in the worker. It must be picklable: a `partial` of a module's function."""

T = TypeVar("T")


@dataclass(frozen=True)
class Turn(Generic[T]):
    """A decoded prompt, or a block of prompts that were continued at once.

    cpu_seconds, wall_seconds: of all the decoding, with the prompt.
    idle_cpu_seconds: processor time of the worker since its last turn.
    """

    decoded: T
    cpu_seconds: float
    wall_seconds: float
    idle_cpu_seconds: float


class Worker:
    """A decoder in a process of its own. Opening it waits until the decoder is open. Raises PeerError.

    modes, settings: the decoder's.
    """

    modes: tuple[str, ...]
    settings: Mapping[str, Any]

    def __init__(self, opener: Opener) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, opener), daemon=True)
        self._process.start()
        theirs.close()
        with self._closed_on_error():
            self.modes, self.settings = self._answer()

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Turn[Decoded]:
        """Return the decoder's answer. Raises PeerError if decoding fails or the process ends; the worker is closed."""
        with self._closed_on_error():
            turn: Turn[Decoded] = self._ask(mode, list(token_ids), count)
            _check([count], [len(turn.decoded.token_ids)])
            return turn

    def serve(self, mode: str, asked: Sequence[Asked]) -> Turn[list[Continued]]:
        """Return the answers of a `Server`. Raises PeerError as `decode` does."""
        with self._closed_on_error():
            turn: Turn[list[Continued]] = self._ask(mode, list(asked))
            _check([one.count for one in asked], [one.tokens for one in turn.decoded])
            return turn

    def close(self) -> None:
        """End the process, and the programs that it runs. Closing again does nothing."""
        if self._pipe.closed:
            return
        self._pipe.close()
        assert self._process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has no group yet
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.terminate()
        self._process.join()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the worker on an error or an interrupt, so that it does not compute in the turns of others."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
        except OSError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(LONGEST_SECONDS):
            raise PeerError(f"no answer in {LONGEST_SECONDS:.0f} seconds")
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer

    def _ended(self) -> PeerError:
        self._process.join()
        return PeerError(f"its process ended with status {self._process.exitcode}")


def _check(expected: Sequence[int], found: Sequence[int]) -> None:
    """Raise PeerError for an answer of another length."""
    for count, other in zip(expected, found, strict=True):
        if count != other:
            raise PeerError(f"expected {count} new tokens, found {other}")


def serve(pipe: Connection, opener: Opener) -> None:
    """Open the decoder and answer requests until the pipe closes. An error is sent as text and ends the process."""
    os.setsid()  # Ctrl-C interrupts the parent only, which ends this process and its children as one group
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print; standard output is for figures only
    try:
        decoder = opener()
        pipe.send((decoder.modes, decoder.settings))
        answer_requests(pipe, decoder)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        with suppress(BrokenPipeError):
            pipe.send(str(error) if isinstance(error, RedraftError) else reason_of(error))


def answer_requests(pipe: Connection, decoder: Decoder | Server) -> None:
    """Answer requests with turns. Raises EOFError or BrokenPipeError when the pipe closes."""
    idle_from = time.process_time()
    while True:
        request = pipe.recv()
        cpu, wall = time.process_time(), time.perf_counter()
        decoded = decoder.decode(*request)
        ended = time.process_time()
        pipe.send(Turn(decoded, ended - cpu, time.perf_counter() - wall, cpu - idle_from))
        idle_from = ended
