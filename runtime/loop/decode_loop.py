"""The decode loop: it schedules, drafts, verifies and commits, a step at a time. It knows no method and no engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from redraft.errors import RedraftError
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.mixed import controller_of
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.loop.scheduler import RequestOutput, Scheduler
from redraft.runtime.observe.profiling import STEP
from redraft.runtime.requests.batch import Batch, Chunk, RequestStep
from redraft.runtime.requests.request import Request, as_redraft_error, drafting
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION, OfferKind

STAGES = {OfferKind.RESAMPLE: "resample", OfferKind.FRESH: "draft"}
"""Names of the parts of a step in which drafters make trees."""
MOST_FAILURES = 3
"""Engine calls in a row that may fail before the requests in them fail."""

LEAST_SHARE = 0.25
"""Time of a chunk's token in a verification, relative to that of a node, at least."""

MakerCall = tuple[TreeMaker, OfferKind]
"""A drafter, and the kind of trees that one call of it makes."""


class Health(NamedTuple):
    """The state of a loop.

    requests, waiting:  requests that have not ended, and those of them without a slot.
    prefixes:           slots whose rows belong to requests that have ended.
    idle_seconds:       since a step made progress; 0 if there is nothing to do, and while others pause the loop.
    error:              of the latest step that failed; None after one that did not.
    kv_usage:           share of the KV rows of requests that is filled, from 0 to 1. Prefixes make room, so theirs do
                        not count.
    """

    requests: int
    waiting: int
    prefixes: int
    idle_seconds: float
    error: RedraftError | None
    kv_usage: float


class DecodeLoop:
    """Decodes requests step by step. One thread calls `step`; `scheduler` takes requests from any.

    A step commits all of its tokens or none. If a drafter or a controller fails, its requests go on without drafts; if
    a sampler fails, its request fails alone; if an engine's call fails, the step is repeated.

    plain: how a request decodes without drafts.   costs: learns from every verification.
    """

    def __init__(
        self, verifier: Verifier, plain: Speculation, costs: VerifyCosts | None = None, max_waiting: int | None = None,
        max_total_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.verifier = verifier
        self.scheduler = Scheduler(verifier, max_waiting, max_total_tokens)
        self.plain = plain
        self._costs = costs
        self._pauses = 0
        self._apart = False  # the latest verification's call failed with chunks: the next one has none
        self._progress = time.monotonic()
        self._error: RedraftError | None = None
        self._ranges = verifier.ranges

    def add(self, request: Request, limited: bool = False) -> None:
        """Add a request. Raises QueueFull and UsageError as `Scheduler.add`."""
        request.plain = self.plain
        request.speculation = request.speculation or self.plain
        if any(part.closed for part in request.speculation.drafter.parts):  # replaced since the request was made
            request.speculation = self.plain
        request.started = time.perf_counter()
        if not len(self.scheduler):
            self._progress = time.monotonic()
        self.scheduler.add(request, limited)

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return self.scheduler.busy

    def step(self) -> list[RequestOutput]:
        """Compute one step of all requests, and return what it brought."""
        batch = self.scheduler.schedule()
        if batch.steps:
            chunks = self._chunks_to_verify(batch)
            with self._ranges.stage(STEP):
                self.draft(batch)
                self.verify(batch, chunks)
                self.commit(batch)
            self._computed(batch.verified_chunks, batch.times.chunks_ms)
        for chunk in batch.chunks:
            if chunk not in batch.verified_chunks:
                self.compute(chunk)
        outputs = self.scheduler.update(batch)
        if outputs or batch.chunks:
            self._progress = time.monotonic()
        return outputs

    def run(self, requests: Iterable[Request]) -> None:
        """Decode requests to their end, in this thread. Raises the error of the first one that failed."""
        requests = list(requests)
        for request in requests:
            self.add(request)
        while self.busy:
            self.step()
        for request in requests:
            if request.error is not None:
                raise request.error

    def draft(self, batch: Batch) -> None:
        """Choose offers, make the trees that they need, and cut them to what is worth verifying."""
        stage, controller = self._ranges.stage, controller_of(batch)
        with drafting(*batch.requests):
            with stage("offers"):
                controller.plan(batch)
            for maker, kind in calls_of(batch.steps):
                self._make(batch, maker, kind)
            if batch.speculates:
                with stage("choose"):
                    controller.cut(batch)
            if batch.nodes > batch.limits.rows:
                raise ValueError(f"a tree of {batch.nodes} nodes, root included, and room for {batch.limits.rows}")
            batch.times.offers_ms = stage("offers").latest * 1e3
            return
        for step in batch.steps:  # a controller failed
            step.plan, step.made, step.tree = (plain := RequestStep.of(step.request)).plan, [], plain.tree

    def _make(self, batch: Batch, maker: TreeMaker, kind: OfferKind) -> None:
        """Let a drafter make the trees that were planned, but those of requests whose other tree has failed."""
        stage = self._ranges.stage
        offers = [None if step.request.drafting_error else step.plan.offer_of(maker, kind) for step in batch.steps]
        budgets = [
            step.plan.limits.budget if offer else NO_SPECULATION
            for step, offer in zip(batch.steps, offers, strict=True)
        ]
        with drafting(*[step.request for step, offer in zip(batch.steps, offers, strict=True) if offer]):
            if kind is OfferKind.FRESH:
                with stage(f"catch-up {maker.name}") as rows:
                    maker.catch_up(batch.requests, budgets)
                batch.times.catch_up_ms += rows.latest * 1e3
            with stage(f"{STAGES[kind]} {maker.name}"):
                trees = (maker.resample if kind is OfferKind.RESAMPLE else maker.draft)(batch.requests, budgets)
            for step, offer, tree in zip(batch.steps, offers, trees, strict=True):
                if offer is not None:
                    batch.check(step.request, tree)
                    step.made.append((offer, tree))

    def _chunks_to_verify(self, batch: Batch) -> list[Chunk]:
        """Return the chunks that the verification's call computes too."""
        if self._apart or not self.verifier.steps.takes_chunks:
            return []
        return [one for one in batch.chunks if one.request.finish_reason is None]

    def verify(self, batch: Batch, chunks: Sequence[Chunk] = ()) -> None:
        """Verify the trees and compute the chunks in one call. If it fails, nothing is computed."""
        stage, trees = self._ranges.stage, [step.tree for step in batch.steps]
        try:
            outcomes = self.verifier.verify(
                batch.requests, trees, [tree for step in batch.steps for _, tree in step.made], chunks
            )
        except Exception as error:  # noqa: BLE001 - engines and their libraries raise anything
            self._apart = bool(chunks)
            self._failed([*batch.requests, *[chunk.request for chunk in chunks]], error)
            batch.chunks = [one for one in batch.chunks if one not in chunks]
            return
        self._error, self._apart = None, False
        for step, outcome in zip(batch.steps, outcomes, strict=True):
            step.outcome = outcome
            step.request.failures = 0
        verified_ms = stage("verify").latest * 1e3
        if chunks:
            alone_ms = self._alone_ms(batch, verified_ms, sum([chunk.tokens for chunk in chunks]))
            batch.verified_chunks, batch.times.chunks_ms = chunks, verified_ms - alone_ms
            for timer in (stage("verify"), stage(STEP)):  # neither contains chunks otherwise
                timer.add(-batch.times.chunks_ms / 1e3)
            verified_ms = alone_ms
        batch.times.verified_ms = verified_ms
        batch.times.made_ms = {  # now, since a device's verification waits for drafts
            (maker.name, kind): stage(f"{STAGES[kind]} {maker.name}").latest * 1e3
            for maker, kind in calls_of(batch.steps)
        }

    def commit(self, batch: Batch) -> None:
        """Give every request its tokens, and report the outcome of its tree to its drafter and its controller."""
        verified = [step for step in batch.steps if step.outcome is not None]
        if not verified:
            return
        stage, times, controller = self._ranges.stage, batch.times, controller_of(batch)
        with stage("commit"):
            for step in verified:
                self._commit(step)
            made_ms = times.catch_up_ms + sum(times.made_ms.values())
            times.host_ms = stage(STEP).elapsed * 1e3 - times.verified_ms - times.chunks_ms - made_ms
            with drafting(*batch.requests):
                controller.observe(batch)
        if self._costs is not None and not batch.verified_chunks:
            rows = self._costs.rows([len(step.tree) for step in batch.steps])
            self._costs.observe(batch.sequences, rows, times.verified_ms)
        self.scheduler.verified(times.verified_ms)
        self._ranges.count([step.tree for step in verified], [step.outcome for step in verified if step.outcome])

    def _commit(self, step: RequestStep) -> None:
        request, outcome = step.request, step.outcome
        assert outcome is not None
        before = len(request.tokens)
        try:
            if request.record is not None and outcome.error is None:
                request.record(request, step.plan, step.tree, outcome)
            request.commit(step.tree, outcome)
        except Exception as error:  # noqa: BLE001 - a trace's file or a detokenizer may raise anything
            request.fail(as_redraft_error(error, "the step could not be committed"))
        step.tokens = tuple(request.tokens[before:])
        if outcome.error is None:
            with drafting(request):
                request.speculation.drafter.accept(request, step.tree, outcome)

    def compute(self, chunk: Chunk) -> None:
        """Compute a chunk's rows. If the call fails, the rows are still missing."""
        request, stage = chunk.request, self._ranges.stage
        if request.finish_reason is not None:
            return
        started = time.perf_counter()
        try:
            with stage("prefill"):
                self.verifier.compute(request, chunk.start, chunk.tokens)
        except Exception as error:  # noqa: BLE001 - as in `verify`
            self._failed([request], error)
            return
        self._error = None
        self._computed([chunk], (time.perf_counter() - started) * 1e3)

    def _alone_ms(self, batch: Batch, ms: float, tokens: int) -> float:
        """Return the estimated time of a verification that took `ms` with so many tokens of chunks, without them.

        A token of a chunk takes at most as long as a node of a tree, and at least a part of that.
        """
        sizes = [len(step.tree) for step in batch.steps]
        of_chunks = ms * tokens / (sum(sizes) + tokens)
        expected = self.scheduler.verified_ms
        if self._costs is not None:
            expected = self._costs.expected_ms(batch.sequences, self._costs.rows(sizes))
        return min(max(expected, ms - of_chunks), ms - LEAST_SHARE * of_chunks)

    def _computed(self, chunks: Sequence[Chunk], ms: float) -> None:
        """Note that the rows of these chunks are computed, which took so long."""
        if not chunks:
            return
        started = time.perf_counter()
        for request, start, tokens in chunks:
            request.failures = 0
            request.num_computed_tokens += tokens
            with drafting(request):
                request.speculation.drafter.prefilled(request, request.slot, start, tokens)
        ms += (time.perf_counter() - started) * 1e3
        self.scheduler.computed(sum([chunk.tokens for chunk in chunks]), ms)

    def _failed(self, requests: Iterable[Request], error: Exception) -> None:
        """Note a call that failed. Requests of too many such calls fail, the others are in the next step again.

        A request whose sampler has chosen already fails at once: samplers keep state, and choose a token once.
        """
        self._error = as_redraft_error(error, "an engine's call failed")
        for request in requests:
            request.failures += 1
            if request.failures >= MOST_FAILURES or request.sampled:
                request.fail(self._error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let `health` know that no step may run in the block."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._progress = time.monotonic()

    def note(self, error: RedraftError) -> None:
        """Let `health` show an error."""
        self._error = error

    @property
    def health(self) -> Health:
        """The loop's state now."""
        requests = len(self.scheduler)
        idle = time.monotonic() - self._progress if requests and not self._pauses else 0.0
        scheduler = self.scheduler
        return Health(
            requests, scheduler.waiting, scheduler.slots.prefixes, idle, self._error, scheduler.kv_usage
        )  # fmt: skip


def calls_of(steps: Iterable[RequestStep]) -> list[MakerCall]:
    """Return the drafter calls that plans need, one a drafter and kind.

    Resampling comes first: a fresh draft may overwrite its inputs.
    """
    offers = [offer for step in steps for offer in step.plan.make]
    calls = {(offer.maker, offer.key.kind): None for offer in offers if offer.maker}
    return sorted(calls, key=lambda call: call[1] is OfferKind.FRESH) if len(calls) > 1 else list(calls)
