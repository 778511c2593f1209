"""Scheduling: which requests a step works on, and how many of their rows it computes."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redraft.errors import RedraftError, UsageError
from redraft.runtime.loop.slots import Slots
from redraft.runtime.loop.waiting import WaitingQueue
from redraft.runtime.requests.batch import Batch, CallLimits, Chunk, RequestStep
from redraft.runtime.requests.request import FinishReason, Request, drafting
from redraft.runtime.steps.verifier import PREFILL_CHUNK, Verifier

if TYPE_CHECKING:
    from redraft.runtime.generation import StepRecord

CHUNK_SHARE, LONG_SHARE = 1.0, 1.6
"""Time of a step's prompt rows, relative to the verification that running requests wait for: of short prompts, and of
long ones. The gap between their tokens is then about 2 and 2.6 times the usual one, and a prompt beside them takes at
least 2 and 1.6 times as long as alone: gaps count most where prompts are many, and the prompt does where it is long."""
LONG_PROMPT = 512
"""Tokens whose rows are not cached from which on a prompt is long."""
LEAST_CHUNK, CHUNK_MULTIPLE = 8, 2
"""Prompt rows of a step, at least, and their multiple. Fewer would take nearly as long, and a call of a new size takes
a millisecond to prepare."""
MEASURED_EVERY = 16
"""Verifications whose calls have prompt rows until one has none, which shows how long it takes without."""
ROWS_AHEAD = 32
"""Rows that a running request should have left before another one gets a slot. Prefixes make room for them."""
_LEARN = 0.25


class QueueFull(RedraftError):
    """More requests wait than the queue takes.

    wait_seconds: estimate until one of them gets a slot; None if no request has ended yet.
    """

    def __init__(self, waiting: int, wait_seconds: float | None) -> None:
        estimate = "" if wait_seconds is None else f", about {wait_seconds:.1f} seconds until one starts"
        super().__init__(f"{waiting} requests wait already{estimate}", "try again later, or raise max_waiting")
        self.waiting = waiting
        self.wait_seconds = wait_seconds

    def __reduce__(self) -> tuple[type[QueueFull], tuple[int, float | None]]:
        return type(self), (self.waiting, self.wait_seconds)


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """What a step brought to one request.

    token_ids: its new tokens.   step: the step that brought them; None if the request ended without one. Of a step that
    another process made, there is the record, if that was asked for.
    finish_reason: why it ended; None if it runs on.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    step: RequestStep | StepRecord | None = None
    finish_reason: FinishReason | None = None


class Scheduler:
    """Holds all requests. `add` and `abort` may be called from any thread, `schedule` and `update` from the loop's.

    A step verifies the tree of every running request, and computes rows of prompts in the time that is left: so no
    running request waits for more than one chunk. A request with a smaller priority takes the slot of one with a larger
    priority, which is parked and goes on later with the same text. If rows run out, the youngest request waits again.
    """

    def __init__(self, verifier: Verifier, max_waiting: int | None = None, max_total_tokens: int | None = None) -> None:
        """max_waiting: most requests without a slot.   max_total_tokens: most rows in all slots. None is no limit."""
        self._verifier = verifier
        self._max_waiting = max_waiting
        self._max_rows = sys.maxsize if max_total_tokens is None else max_total_tokens
        self._lock = threading.Lock()
        self._waiting = WaitingQueue()
        self._aborted: deque[Request] = deque()
        self._outputs: list[RequestOutput] = []
        self._deadlines: set[Request] = set()
        self._row_ms: float | None = None
        self._verified_ms = 0.0
        self._steps_with_chunks = 0
        self._request_seconds: float | None = None
        self._last_end = 0.0
        self.slots = Slots(verifier)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self.slots.running) + len(self.slots.filling)

    @property
    def busy(self) -> bool:
        """True if a request has not ended, or if an output was not returned yet."""
        return len(self) > 0 or bool(self._outputs or self._aborted)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the rows that requests may have which is filled."""
        most = min(self._max_rows, self._verifier.max_num_seqs * self._verifier.max_model_len)
        return sum([one.num_computed_tokens for one in self._active]) / most

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        with self._lock:
            return [*self._active, *self._waiting]

    def add(self, request: Request, limited: bool = False) -> None:
        """Add a request. Raises QueueFull if it would wait and too many do, unless it is not `limited`.

        Raises UsageError as `check`.
        """
        self.check(request)
        with self._lock:
            if len(self) == 0:
                self._last_end = 0.0  # the time without requests says nothing of their pace
            free = self.slots.free if self._has_space(request, self._active) else 0
            most = None if self._max_waiting is None else self._max_waiting + free
            if limited and most is not None and len(self._waiting) >= most:
                raise self._queue_full()
            self._waiting.push(request)

    def check_queue(self, count: int) -> None:
        """Raise QueueFull if `add` would now refuse one of so many limited requests, and UsageError if it always would.

        It does not know their rows: `add` may refuse more.
        """
        if self._max_waiting is None:
            return
        most = self._max_waiting + self._verifier.max_num_seqs
        if count > most:
            raise UsageError(f"{count} requests at once are too many: {most} may run or wait", "raise max_waiting")
        if len(self) + count > most:
            raise self._queue_full()

    def _queue_full(self) -> QueueFull:
        waiting, pace = len(self._waiting), self._request_seconds
        return QueueFull(waiting, None if pace is None else pace * waiting)

    def check(self, request: Request) -> None:
        """Raise UsageError for a request that could need more rows than all slots may have."""
        if request.limit > self._max_rows:
            raise UsageError(
                f"the request may have {request.limit} tokens, and all requests together {self._max_rows}",
                "lower max_tokens, shorten the prompt, or raise max_total_tokens",
            )

    def end_all(self, error: RedraftError) -> list[RequestOutput]:
        """End every request with an error. Returns these outputs, and those that were not returned yet."""
        for request in self.requests:
            self._fail(request, error)
        return self._taken()

    def end_concerned(self, error: RedraftError) -> list[RequestOutput]:
        """End the requests with slots with an error, after a step that raised. Drop all rows.

        If it concerned no request with a slot, and no other has ended, all end.

        Returns their outputs, and those that were not returned yet.
        """
        with self._lock:
            for request in self._active or ([] if self._outputs else [*self._waiting]):
                self._waiting.remove(request)
                self._deadlines.discard(request)
                self._fail(request, error)
            self.slots.reset()
        return self._taken()

    def _fail(self, request: Request, error: RedraftError) -> None:
        """End a request with an error, unless it has ended and its slot could not be taken."""
        if request.finish_reason is None:
            request.fail(error)
            request.ended = self._verifier.clock.copy()
            self._outputs.append(RequestOutput(request, finish_reason=request.finish_reason))

    def _taken(self) -> list[RequestOutput]:
        """Return the outputs that were not returned yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def abort(self, request: Request) -> None:
        """End a request before the next step. Does nothing if it has ended."""
        self._aborted.append(request)

    def schedule(self) -> Batch:
        """Return the next step: a tree of every running request, and chunks of those whose rows are missing."""
        self._end_early()
        self._admit()
        slots, verifier = self.slots, self._verifier
        for request in [one for one in slots.filling if one.missing_rows == 0]:
            slots.join(request)
        spare = self._claim_rows()
        chunks = self._chunks(spare)
        steps = [RequestStep.of(request) for request in slots.running]
        most = max([request.num_computed_tokens for request in slots.running], default=0)
        beside, sequences = sum([chunk.tokens for chunk in chunks]), max(len(steps), 1)
        rows = min(verifier.max_model_len - most, verifier.largest_tree, (verifier.most_rows - beside) // sequences)
        rows = min(rows, 1 + (spare - beside) // sequences)
        if chunks and verifier.steps.takes_chunks:  # in the same call, a prompt's row is of use for certain
            rows = min(rows, 1)
        past_end = verifier.device.step_graphs
        limits = CallLimits(rows, verifier.branches, verifier.block_rows, past_end, verifier.vocabulary)
        return Batch(steps, limits, chunks)

    def update(self, batch: Batch) -> list[RequestOutput]:
        """Take the slots of requests that ended, and return what the step brought."""
        for step in batch.steps:
            request = step.request
            if step.tokens or request.finish_reason is not None:
                self._outputs.append(RequestOutput(request, step.tokens, step, request.finish_reason))
        for request in [one for one in self.slots.filling if one.finish_reason is not None]:
            self._outputs.append(RequestOutput(request, (), None, request.finish_reason))
        for output in self._outputs:
            if output.finish_reason is not None and output.request.slot >= 0:
                self._leave(output.request)
        return self._taken()

    def computed(self, rows: int, ms: float) -> None:
        """Learn the time of prompt rows."""
        known = self._row_ms
        self._row_ms = ms / rows if known is None else known + _LEARN * (ms / rows - known)

    @property
    def verified_ms(self) -> float:
        """The usual time of a verification now; 0 before the first."""
        return self._verified_ms

    def verified(self, ms: float) -> None:
        """Learn the time of a verification, without prompt rows."""
        self._verified_ms += _LEARN * (ms - self._verified_ms) if self._verified_ms else ms

    def _end_early(self) -> None:
        """End requests that were aborted, and those whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            while self._aborted:
                self._end(self._aborted.popleft(), "abort")
            late = [request for request in self._deadlines if request.due is not None and request.due <= now]
            for request in [*self._waiting.expired(now), *late]:
                self._end(request, "timeout")

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.finish_reason is not None:
            return
        self._waiting.remove(request)
        request.finish_reason, request.ended = reason, self._verifier.clock.copy()
        self._outputs.append(RequestOutput(request, finish_reason=reason))
        if request.slot >= 0:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take the slot of a request that ended. Rows of a failed one are dropped."""
        request.ended = self._verifier.clock.copy()
        if request.finish_reason in ("stop", "length"):
            with drafting(request):
                request.speculation.drafter.finish(request)
        self.slots.leave(request, park=request.finish_reason != "error")
        self._deadlines.discard(request)
        now = time.perf_counter()
        if self._last_end:
            pace = now - self._last_end
            known = self._request_seconds
            self._request_seconds = pace if known is None else known + _LEARN * (pace - known)
        self._last_end = now

    def _admit(self) -> None:
        """Give slots to waiting requests. Requests of larger priorities make room for those of smaller ones."""
        while True:
            with self._lock:
                request = self._waiting.first
                if request is None:
                    return
                if not self._has_space(request, [one for one in self._active if one.priority <= request.priority]):
                    return
                while not self._has_space(request, self._active):
                    self._suspend(self._youngest(), park=True)
                self._waiting.pop()
            with self._known(request):
                self.slots.admit(request)
            if request.due is not None:
                self._deadlines.add(request)

    @contextmanager
    def _known(self, request: Request) -> Iterator[None]:
        """Let whoever ends the requests that a fault concerns know this one, if the block has a fault of ours."""
        try:
            yield
        except BaseException:
            if request not in self._active:
                self.slots.filling.append(request)
            raise

    @property
    def _active(self) -> list[Request]:
        return [*self.slots.running, *self.slots.filling]

    def _has_space(self, request: Request, others: Sequence[Request]) -> bool:
        """True if a request finds a slot beside others, and rows for all tokens so far and for some more of each."""
        rows = sum([len(one.tokens) + ROWS_AHEAD for one in others]) + len(request.tokens)
        return len(others) < self._verifier.max_num_seqs and (rows <= self._max_rows or not others)

    def _claim_rows(self) -> int:
        """Make room for a row of each request. Returns the rows that are left, besides one of each running request.

        Prefixes are dropped first, also for trees and chunks, the least recently used one first. Then the youngest
        requests lose their rows, and wait.
        """
        slots = self.slots
        wanted = ROWS_AHEAD * len(slots.running)
        wanted += sum([min(request.missing_rows, PREFILL_CHUNK) for request in slots.filling])
        while self._max_rows - slots.rows < wanted and slots.drop_oldest():
            pass
        while (left := self._max_rows - slots.rows - len(slots.running)) < len(slots.filling):
            with self._lock:
                self._suspend(self._youngest(), park=False)
        return left

    def _youngest(self) -> Request:
        """Return the youngest request of the largest priority number."""
        return max(self._active, key=lambda request: (request.priority, request.started))

    def _suspend(self, request: Request, park: bool) -> None:
        """Take a request's slot. It waits, before all others of its priority."""
        with self._known(request):
            self.slots.leave(request, park)
        request.num_computed_tokens = 0
        self._deadlines.discard(request)
        self._waiting.push(request, first=True)

    def _chunks(self, most: int) -> list[Chunk]:
        """Return the rows to compute beside the verification, at most `most`, of the first requests first."""
        budget, chunks = min(self._budget(), most), list[Chunk]()
        in_call = self.slots.running and self._verifier.steps.takes_chunks
        if in_call:
            budget = min(budget, self._verifier.most_rows - len(self.slots.running))
        for request in sorted(self.slots.filling, key=lambda request: request.priority):
            rows = min(request.missing_rows, budget, PREFILL_CHUNK)
            if rows > 0:
                chunks.append(Chunk(request, request.num_computed_tokens, rows))
                budget -= rows
        if in_call and chunks:
            self._steps_with_chunks = (self._steps_with_chunks + 1) % MEASURED_EVERY
        return chunks if self._steps_with_chunks or not in_call else []

    def _budget(self) -> int:
        """Return the prompt rows of a step. If nobody waits for its end, it is a whole chunk."""
        if not self.slots.running or self._row_ms is None or not self._verified_ms:
            return PREFILL_CHUNK if not self.slots.running else LEAST_CHUNK
        is_long = any(len(one.tokens) - one.cached_tokens >= LONG_PROMPT for one in self.slots.filling)
        allowed_ms = (LONG_SHARE if is_long else CHUNK_SHARE) * self._verified_ms
        rows = int(allowed_ms / max(self._row_ms, 1e-6)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
        return min(max(rows, LEAST_CHUNK), PREFILL_CHUNK)
