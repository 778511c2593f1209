"""The runtime behind a server: admits requests within the limits, and knows whether it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from anyio import CapacityLimiter, to_thread

from redraft.errors import RedraftError, UsageError
from redraft.runtime.api import GREEDY
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.params import SamplingParams
from redraft.runtime.server.errors import ApiError, api_error, unavailable, wrong
from redraft.runtime.server.limits import Backlog
from redraft.runtime.server.metrics import ServerMetrics
from redraft.runtime.server.parameters import Job
from redraft.runtime.server.request_record import current_record
from redraft.runtime.server.served import Served
from redraft.runtime.server.settings import ServerSettings
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.submission import Submission

_LOG = logging.getLogger("redraft.server")
_MOST_SUBMITTING = 256


class Service:
    """A runtime with the settings, the metrics and the limits of a server.

    defaults:    sampling parameters of requests that give none: the model's own if its bundle keeps them, else greedy.
    fingerprint: names build, precision and kernels; equal ones compute equal answers to equal requests.
    created:     seconds since 1970 when the server began.
    draining:    True if it takes no new requests.   open_answers: HTTP answers that have not ended.
    """

    def __init__(self, runtime: Served, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self.runtime = runtime
        self.settings = settings
        self.metrics = metrics
        self.defaults = _defaults(runtime)
        self.fingerprint = runtime.fingerprint
        self.created = int(time.time())
        self.draining = False
        self.open_answers = 0
        self.texts = TokenTexts(runtime.tokenizer)
        self._backlog = Backlog(settings.max_queued_tokens)
        self._submitting = CapacityLimiter(_MOST_SUBMITTING)  # a gateway waits for replicas, and others need threads
        self._running: set[Submission] = set()

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens of a prompt; the context must hold a new token too."""
        most = self.runtime.max_model_len - 1
        return min(most, self.settings.max_prompt_tokens or most)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for a model that is not the served one. None is the served one."""
        if name not in (None, self.settings.model_name):
            message = f"the model {name!r} does not exist; GET /v1/models lists those of this server"
            raise ApiError(404, message, "model", "model_not_found")

    def not_ready(self) -> str | None:
        """Return why the server cannot work on requests; None if it can."""
        if self.draining:
            return "the server is shutting down"
        try:
            self.runtime.check_running()
            health, stalled = self.runtime.health, self.seconds_to_stall() <= 0
        except UsageError as error:
            return error.message
        if reason := self.runtime.unavailable():
            return reason
        if stalled:
            return f"no step has made progress for {health.idle_seconds:.0f} s, and {health.requests} requests wait"
        if health.requests and health.error is not None:
            return f"the latest step failed: {health.error.message}"
        return None

    def seconds_to_stall(self) -> float:
        """Return in how many seconds the server counts as stalled unless a step makes progress; 0 or less if it is.

        Raises UsageError if the runtime is closed.
        """
        return self.settings.progress_timeout - self.runtime.health.idle_seconds

    def check_queue(self, choices: int) -> None:
        """Raise ApiError or QueueFull if the queue has no space for so many choices now, or never has.

        For a look before the work of preparing a request. Another request may still take the space.
        """
        self._check_accepting()
        try:
            self.runtime.check_queue(choices)
        except UsageError as error:
            raise wrong(error.message, "n", "too_many_choices") from error

    async def submit(self, prompts: Sequence[Sequence[int]], job: Job) -> list[Submission]:
        """Start every choice of every prompt, all of them or none. The choices of a prompt are in a row.

        prompts: token ids.   Raises ApiError.
        """
        work = asyncio.ensure_future(to_thread.run_sync(self._submit, prompts, job, limiter=self._submitting))
        try:
            started = await asyncio.shield(work)
        except asyncio.CancelledError:  # the client has left; its requests would run without anyone
            work.add_done_callback(self._release_unread)
            raise
        if (record := current_record()) is not None:
            record.submitted(started, job)
        return started

    def _release_unread(self, work: asyncio.Future[list[Submission]]) -> None:
        """End what was submitted for a client that had left before."""
        if not work.cancelled() and work.exception() is None:
            self.release(work.result())

    def _submit(self, prompts: Sequence[Sequence[int]], job: Job) -> list[Submission]:
        self._check_accepting()
        try:
            return self._start_all(prompts, job)
        except RedraftError as error:
            self._check_accepting()  # a runtime that died or was closed is nothing that the request can fix
            raise api_error(error) from error

    def _start_all(self, prompts: Sequence[Sequence[int]], job: Job) -> list[Submission]:
        """Submit every choice. Raises ApiError if too many tokens are queued, and the errors of `Runtime.submit`."""
        started: list[Submission] = []
        queued = job.choices * sum(map(len, prompts))
        self._backlog.enter(queued)
        try:
            for ids in prompts:
                for _ in range(job.choices):
                    started.append(self._start(ids, job, len(started)))
                    queued -= len(ids)
        except BaseException:
            self._backlog.cancel(queued)
            self.release(started)
            raise
        return started

    def _check_accepting(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        try:
            self.runtime.check_running()
            stalled = self.seconds_to_stall() <= 0
        except UsageError as error:
            raise unavailable(error.message, "not_running") from error
        if stalled:
            raise unavailable("no step has made progress for too long", "no_progress")

    def _start(self, ids: Sequence[int], job: Job, index: int) -> Submission:
        """Submit the choice of this index in the answer. Raises the errors of `Runtime.submit`."""
        submission = self.runtime.submit(
            ids, job.choice(index), job.speculation, priority=job.priority,
            timeout=self.settings.request_timeout, first_token_timeout=self.settings.first_token_timeout,
            tenant=job.tenant, cache_salt=job.cache_salt, session=job.session,
            on_output=_Watcher(self.metrics, self._backlog, len(ids)), keep_trees=job.tells_steps,
        )  # fmt: skip
        self.metrics.arrived(len(ids))
        self._running.add(submission)
        return submission

    def release(self, submissions: Sequence[Submission]) -> None:
        """End submissions that nobody reads any more. Does nothing to those that have ended."""
        for submission in submissions:
            submission.abort()
            self._running.discard(submission)

    def abort_all(self) -> None:
        """End all requests; their answers tell that the server is shutting down."""
        for submission in list(self._running):
            submission.abort()


class _Watcher:
    """Notes the outputs of a choice, in the loop's thread. Its first one takes its tokens out of the queue."""

    def __init__(self, metrics: ServerMetrics, backlog: Backlog, tokens: int) -> None:
        self._metrics = metrics
        self._backlog = backlog
        self._queued = tokens

    def __call__(self, output: RequestOutput) -> None:
        self._metrics.output(output.request, output)
        if self._queued and (output.token_ids or output.finish_reason is not None):
            queued, self._queued = self._queued, 0
            (self._backlog.leave if output.token_ids else self._backlog.cancel)(queued)
        if output.finish_reason is not None:
            self._metrics.ended(output.request)


def _defaults(runtime: Served) -> SamplingParams:
    try:
        return runtime.model_sampling()
    except UsageError as error:
        _LOG.info("requests are decoded greedily unless they say otherwise: %s", error.message)
        return GREEDY
