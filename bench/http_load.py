"""A closed loop of streamed completions over HTTP, in a process of its own: times of events, and texts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from redraft.bench.http_client import Client
from redraft.bench.statistics import Timing

_PATH = "/v1/completions"


@dataclass
class Answered:
    """One streamed answer. Times are seconds of `time.perf_counter` in the driver.

    request: its index in the block.   outputs: of each event with text or an end.
    tokens:  as the server counts them, or the events if it does not.
    """

    request: int
    submitted: float
    outputs: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    ended: float = 0.0


class Driver:
    """A process that sends requests, so that it shares no interpreter with the server."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._pool.submit(time.perf_counter).result()  # it has started, and imported this module

    def __enter__(self) -> Driver:
        """Return itself, which ends with its process at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Answered]:
        """Return the answers to completions, in order. Raises the errors of `Client.events`.

        clients: each sends the next request when its last one has ended.
        """
        return self._pool.submit(closed_loop, url, bodies, clients).result()


def closed_loop(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Answered]:
    """Send requests from so many threads, and return the answers in order."""
    found: list[Answered] = []
    left, lock = iter(range(len(bodies))), threading.Lock()

    def client() -> None:
        with Client(url) as connection:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                found.append(_answer(connection, number, bodies[number]))

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client) for _ in range(clients)]:
            done.result()
    return sorted(found, key=lambda one: one.request)


def _answer(client: Client, number: int, body: Mapping[str, Any]) -> Answered:
    found = Answered(number, time.perf_counter())
    for now, event in client.events(_PATH, {**body, "stream_options": {"include_usage": True}}):
        if event.get("choices"):
            found.outputs.append(now)
            found.text += event["choices"][0].get("text") or ""
        if event.get("usage"):
            found.tokens = int(event["usage"]["completion_tokens"])
    found.ended = time.perf_counter()
    found.tokens = found.tokens or len(found.outputs)
    return found


def timing(answers: Sequence[Answered]) -> Timing:
    """Return all tokens of a block, and the seconds from its first request to its last end."""
    seconds = max(one.ended for one in answers) - min(one.submitted for one in answers)
    return Timing(sum(one.tokens for one in answers), seconds)
