"""A request at the gateway, and the call that a replica works on for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from redraft.errors import BackendError
from redraft.runtime.drafters.chain_lookups import PredictedText
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.replicas.calls import Call, Started, Update
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Sampler
from redraft.types import FloatArray, Outcome, Tree

_LOG = logging.getLogger("redraft.replicas")
_PREDICTION = "prediction"


class Recorded(Sampler):
    """The sampler of a request that another process samples: it has the log probabilities that came from there."""

    def __init__(self, logprobs: int | None) -> None:
        self.logprobs = None if logprobs is None else []

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        raise NotImplementedError("a replica samples")


@dataclass(eq=False)
class Line:
    """A request and its call.

    taken:   done when a replica has taken the request, or will not.   task: follows the call.
    replica: the one that works on it; empty if none does.   texts: of that one's identity.
    deaths:  of replicas that worked on it.
    tries, refusals: calls in a row that no replica took, and for which one had no space.
    limit:   of its time.   ended: True when its last output has been delivered.
    """

    request: Request
    call: Call
    taken: Future[None] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None
    replica: str = ""
    texts: str = ""
    deaths: int = 0
    tries: int = 0
    refusals: int = 0
    limit: asyncio.Timeout | None = None
    ended: bool = False
    _predicted: tuple[int, int] = (0, 0)

    def start(self, started: Started) -> None:
        """Note the replica that has taken it. Raises BackendError if it would go on with another text."""
        if self.texts != started.texts and self.request.new_tokens:
            raise BackendError(
                "the replica is gone, and another one would write another text", "send the request again"
            )
        self.replica, self.texts = started.replica, started.texts
        self.tries = self.refusals = 0
        self.request.fingerprint = started.fingerprint
        if not self.taken.done():
            self.taken.set_result(None)

    def refused(self) -> None:
        """Note that a replica has no space, so that the next call may go to another one than the session's."""
        self.refusals += 1
        self.call = replace(self.call, session=None)

    def lose(self) -> None:
        """Let the request go on after its tokens, with another replica."""
        request, now = self.request, time.monotonic()
        text = request.drafting.get(_PREDICTION)
        self._predicted = (0, 0) if text is None else (text.accepted, text.rejected)
        self.replica, request.slot = "", -1
        first = request.first_token_deadline
        self.call = replace(
            self.call,
            written=tuple(request.new_tokens),
            timeout=None if request.deadline is None else max(request.deadline - now, 0.001),
            first_token_timeout=None if first is None or request.new_tokens else max(first - now, 0.001),
        )

    def deliver(self, update: Update) -> None:
        """Bring the request to the state that a replica tells of, and hand its output on."""
        request = self.request
        if update.token_ids:
            if not request.first_token:
                request.first_token, request.cached_tokens = time.perf_counter(), update.cached_tokens
                request.admitted = request.started + update.waited
            request.slot, request.num_computed_tokens = 0, update.rows
            request.append(update.token_ids)
            if request.sampler.logprobs is not None:
                request.sampler.logprobs += update.logprobs
        if update.drafted is not None:
            request.counters.count(update.drafted, update.accepted)
        if any(update.predicted):
            text = request.drafting.setdefault(_PREDICTION, PredictedText((), 0))
            text.accepted, text.rejected = map(sum, zip(self._predicted, update.predicted, strict=True))
        request.finish_reason, request.error = update.finish_reason, update.error
        self.ended = update.finish_reason is not None
        if request.deliver is not None:
            try:
                request.deliver(RequestOutput(request, update.token_ids, update.step, update.finish_reason))
            except Exception:  # noqa: BLE001 - a caller's function; nobody else may lose an output by it
                _LOG.exception("a request's callback raised")
