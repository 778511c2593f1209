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
from typing import Any

from redraft.bench.command import reason_of
from redraft.bench.peers.base import Decoded, Decoder, PeerError
from redraft.errors import RedraftError

LONGEST_SECONDS = 3600.0
"""A worker that takes longer for an answer has failed."""
Opener = Callable[[], Decoder]
"""Opens a decoder in the worker. It must be picklable: a `partial` of a module's function."""


@dataclass(frozen=True)
class Turn:
    """A decoded prompt.

    cpu_seconds, wall_seconds: of all the decoding, with the prompt.
    idle_cpu_seconds: processor time of the worker since its last turn.
    """

    decoded: Decoded
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

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Turn:
        """Return the decoder's answer. Raises PeerError if decoding fails or the process ends; the worker is closed."""
        with self._closed_on_error():
            try:
                self._pipe.send((mode, list(token_ids), count))
            except OSError:
                raise self._ended() from None
            turn: Turn = self._answer()
            if len(turn.decoded.token_ids) != count:
                raise PeerError(f"expected {count} new tokens, found {len(turn.decoded.token_ids)}")
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


def answer_requests(pipe: Connection, decoder: Decoder) -> None:
    """Answer requests with turns. Raises EOFError or BrokenPipeError when the pipe closes."""
    idle_from = time.process_time()
    while True:
        mode, token_ids, count = pipe.recv()
        cpu, wall = time.process_time(), time.perf_counter()
        decoded = decoder.decode(mode, token_ids, count)
        ended = time.process_time()
        pipe.send(Turn(decoded, ended - cpu, time.perf_counter() - wall, cpu - idle_from))
        idle_from = ended
