"""The load of a soak: clients that ask, leave, and compare each answer with the expected one."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from redraft.bench.http_client import Client, Json, Refused
from redraft.bench.soak_answers import Choices
from redraft.bench.soak_requests import COMPLETIONS, WRONG, Asked, varied
from redraft.errors import BackendError

_SAMPLE_SECONDS, _MOST_REASONS = 0.5, 20


@dataclass
class Tally:
    """What happened.

    wrong: the first reasons of failures.   memory: seconds and MB.
    gaps:  seconds, the longest between two events of each stream that was read to its end.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        """Count an event."""
        with self.lock:
            self.counts[what] += 1

    def fail(self, what: str, reason: str) -> None:
        """Count a failure, and keep the reason of the first ones."""
        with self.lock:
            self.counts[what] += 1
            if len(self.wrong) < _MOST_REASONS:
                self.wrong.append(f"{what}: {reason}"[:600])


class Load:
    """Clients that send requests until they are told to stop, each with random numbers of its own."""

    def __init__(
        self, url: str, requests: Sequence[Asked], expected: Sequence[Sequence[Choices]], methods: Sequence[str]
    ) -> None:
        """expected: of each request, its answers, one for each build that may give it."""
        self.tally = Tally()
        self._url, self._requests, self._expected, self._methods = url, requests, expected, methods
        self._ways: tuple[tuple[Callable[[Client, random.Random], None], int], ...] = (
            (self._whole, 6), (self._stream, 6), (self._leave_stream, 2), (self._leave, 2), (self._wrong, 1),
        )  # fmt: skip

    def run(self, clients: int, is_over: Callable[[], bool], watch: Callable[[Tally], None]) -> None:
        """Run so many clients until `is_over`. `watch` is called about twice a second, in this thread."""
        over = threading.Event()
        threads = [threading.Thread(target=self._client, args=(number, over)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            while not is_over() and any(thread.is_alive() for thread in threads):
                watch(self.tally)
                time.sleep(_SAMPLE_SECONDS)
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _client(self, number: int, over: threading.Event) -> None:
        draw = random.Random(number)
        ways, weights = zip(*self._ways, strict=True)
        with Client(self._url) as client:
            while not over.is_set():
                (way,) = draw.choices(ways, weights)
                try:
                    way(client, draw)
                except BackendError as error:
                    self.tally.fail("errors", str(error))
                except Exception as error:  # noqa: BLE001 - a client that dies would look like one that succeeds
                    self.tally.fail("errors", repr(error))
                    client.close()

    def _drawn(self, draw: random.Random) -> tuple[int, Asked, Json]:
        """Return a request's number, the request and the fields to send."""
        number = draw.randrange(len(self._requests))
        asked = self._requests[number]
        return number, asked, varied(draw, asked, self._methods)

    def _whole(self, client: Client, draw: random.Random) -> None:
        number, asked, fields = self._drawn(draw)
        choices = Choices()
        choices.add(client.ask(asked.path, fields))
        self._compare(number, fields, choices)

    def _stream(self, client: Client, draw: random.Random) -> None:
        number, asked, fields = self._drawn(draw)
        choices, times = Choices(), list[float]()
        for now, event in client.events(asked.path, fields):
            choices.add(event)
            times.append(now)
        self.tally.gaps.append(max([after - before for before, after in pairwise(times)], default=0.0))
        self._compare(number, fields, choices)

    def _compare(self, number: int, fields: Json, choices: Choices) -> None:
        self.tally.count("answers")
        if not choices.among(self._expected[number]):
            self._differs("gave", number, fields, choices)

    def _differs(self, how: str, number: int, fields: Json, choices: Choices) -> None:
        alone = {one.build: one.all for one in self._expected[number]}
        self.tally.fail("different", f"{fields} {how} {choices.build}: {choices.all}, alone {alone}")

    def _leave_stream(self, client: Client, draw: random.Random) -> None:
        """Leave after some events, or at the end of a short answer."""
        number, asked, fields = self._drawn(draw)
        choices, events = Choices(), draw.randint(0, 6)
        for place, (_, event) in enumerate(client.events(asked.path, fields)):
            choices.add(event)
            if place >= events:
                break
        client.close()
        self.tally.count("left")
        if not choices.begin(self._expected[number]):
            self._differs("began with", number, fields, choices)

    def _leave(self, client: Client, draw: random.Random) -> None:
        """Leave before the answer to a request."""
        _, asked, fields = self._drawn(draw)
        client.send(asked.path, fields)
        time.sleep(draw.choice((0.0, 0.01, 0.1)))
        client.close()
        self.tally.count("left")

    def _wrong(self, client: Client, draw: random.Random) -> None:
        more, status = draw.choice(WRONG)
        fields = {"model": self._requests[0].fields["model"], "prompt": "a", **more}
        try:
            client.ask(COMPLETIONS, fields)
            self.tally.fail("errors", f"{more} was answered")
        except Refused as error:
            self.tally.count("refused")
            if error.status != status:
                self.tally.fail("errors", f"{more} should have status {status}: {error}")
