"""The side of the gateway: it sends requests to replicas, and goes on with them elsewhere if a replica dies.

Texts depend on the request alone, so a request that goes on after the tokens which its client has gets the text that it
would have got. The client sees one stream without a gap.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from redraft import __version__
from redraft.engines import Bundle
from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.drafters.chain_lookups import PredictedText
from redraft.runtime.loop.decode_loop import Health
from redraft.runtime.loop.request_maker import bare_request, reader_of
from redraft.runtime.loop.scheduler import QueueFull, RequestOutput
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.replicas.calls import Answer, Call, Description, Started, Update
from redraft.runtime.requests.request import Request, as_redraft_error
from redraft.runtime.sampling import model_sampling
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.submission import Listener, Submission
from redraft.runtime.text.tokenizer import Tokenizer
from redraft.runtime.trees.offers import Speculation
from redraft.types import FloatArray, Outcome, Tree

_LOG = logging.getLogger("redraft.replicas")
MAX_RETRIES = 1
"""Deaths of its replica that a request survives. The request may be what kills them."""
_RETRY_SECONDS = 0.05
"""Until a request is sent again."""
_LATE_SECONDS = 1.0
"""Time past its deadline after which a request ends here, if no replica has ended it."""


class ReplicaDied(Exception):
    """The replica of a call is gone, or its stream ended before the request."""


class Replicas(Protocol):
    """A set of replicas."""

    def run(self, call: Call) -> AsyncGenerator[Answer]:
        """Send a call to a replica, and yield its answers as `Replica.run`. Raises ReplicaDied if it dies."""


class Recorded(Sampler):
    """The sampler of a request that another process samples: it has the log probabilities that came from there."""

    def __init__(self, logprobs: int | None) -> None:
        self.logprobs = None if logprobs is None else []

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        raise NotImplementedError("a replica samples")


@dataclass(eq=False)
class _Line:
    """A request, and the call that a replica works on for it.

    taken:    done when a replica has taken it, or refused to.   deaths: of replicas that worked on it.
    predicted: counts of the calls before this one.   limit: of its time.
    """

    request: Request
    call: Call
    taken: Future[None] = field(default_factory=Future)
    task: asyncio.Task[None] | None = None
    replica: str = ""
    texts: str = ""
    deaths: int = 0
    predicted: tuple[int, int] = (0, 0)
    limit: asyncio.Timeout | None = None


class Gateway:
    """What a server asks instead of a `Runtime`: the same requests, worked on by replicas.

    description: of one of the replicas, which understands this version and the bundle's tokens.
    retries: deaths of its replica that a request survives.   max_waiting: requests that may wait here for a replica.
    All methods may be called from any thread.
    """

    def __init__(
        self, bundle: Bundle, tokenizer: Tokenizer, replicas: Replicas, description: Description,
        retries: int = MAX_RETRIES, max_waiting: int | None = None,
    ) -> None:  # fmt: skip
        manifest = bundle.manifest
        self.tokenizer = tokenizer
        self.description = description
        self.max_model_len = manifest.max_model_len
        self.vocabulary = description.vocabulary
        self.caveats = manifest.model.caveats
        self.calls_lost: int | None = 0
        """Deaths of replicas, counted once for each request that they worked on."""
        self._bundle = bundle
        self._stop_tokens = frozenset(manifest.eos_token_ids)
        self._replicas = replicas
        self._retries = retries
        self._max_waiting = max_waiting
        self._lines: dict[Request, _Line] = {}
        self._latest: dict[str, Update] = {}
        """The last update of each replica, also of those that died."""
        self._alive: set[str] = set()
        self._progress = time.monotonic()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redraft gateway", daemon=True)
        self._thread.start()

    @property
    def fingerprint(self) -> str:
        """That of a replica. Each request has the one of the replica that works on it."""
        return self.description.fingerprint

    @property
    def methods(self) -> tuple[str, ...]:
        """All values of `method` that the replicas support."""
        return self.description.methods

    @property
    def default_method(self) -> str:
        """The method of requests that name none."""
        return self.description.default_method

    def model_sampling(self, **given: Any) -> SamplingParams:
        """As `Runtime.model_sampling`."""
        return model_sampling(self._bundle.path, given)

    @property
    def health(self) -> Health:
        """The state of all replicas together. No prefixes are counted."""
        lines = list(self._lines.values())
        idle = time.monotonic() - self._progress if lines else 0.0
        usage = [self._latest[name].kv_usage for name in tuple(self._alive) if name in self._latest]
        waiting = sum(line.request.slot < 0 for line in lines)
        return Health(len(lines), waiting, 0, idle, None, sum(usage) / len(usage) if usage else 0.0)

    @property
    def running(self) -> list[Request]:
        """The requests that have not ended."""
        return [line.request for line in list(self._lines.values())]

    @property
    def gain(self) -> Gain:
        """The sums over all replicas that there have been."""
        gains = [update.gain for update in list(self._latest.values())]
        return Gain(sum(one.spent_ms for one in gains), sum(one.plain_ms for one in gains))

    @property
    def slots(self) -> int:
        """Requests that the replicas which have worked on requests may run at once."""
        return self.description.slots * max(len(self._alive), 1)

    def reload_drafters(self) -> tuple[str, ...]:
        """Raise UsageError: replicas are exchanged instead, one after another."""
        raise UsageError("replicas do not read drafters again", "deploy the application again, which exchanges them")

    def replica_of(self, request: Request) -> str:
        """Return the name of the replica that works on a request; empty if none does."""
        line = self._lines.get(request)
        return "" if line is None else line.replica

    def check_running(self) -> None:
        """Raise UsageError if the gateway is closed."""
        if self._closed:
            raise UsageError("this gateway is closed", "open it again")

    def check_queue(self, count: int) -> None:
        """Raise QueueFull if too many requests wait for a replica. Those that have one are in its own queue."""
        waiting = sum(not line.taken.done() for line in list(self._lines.values()))
        if self._max_waiting is not None and waiting + count > self._max_waiting:
            raise QueueFull(waiting, None)

    def close(self) -> None:
        """End all requests with an error. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for line in list(self._lines.values()):
            self._cancel(line)
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        tasks = [line.task for line in list(self._lines.values()) if line.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(  # noqa: PLR0913 - as `Runtime.submit`
        self, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationParams, *,
        priority: int = 0, timeout: float | None = None, first_token_timeout: float | None = None,
        tenant: str | None = None, cache_salt: str | None = None, session: str | None = None,
        on_output: Listener | None = None, keep_trees: bool = False,
    ) -> Submission:  # fmt: skip
        """Begin to continue `prompt`, as `Runtime.submit` does. Returns when a replica has taken the request.

        session: requests of one session go to one replica as long as that lives.

        Raises UsageError and QueueFull as the replica does.
        """
        self.check_running()
        ids = list(prompt)
        sampler, stops = Recorded(params.logprobs), frozenset() if params.ignore_eos else self._stop_tokens
        request = bare_request(self.tokenizer, ids, params, self.max_model_len, stops, sampler)
        request.priority, request.salt, request.tenant = priority, cache_salt, tenant
        request.speculation = Speculation(None, None, speculation.method or self.default_method)  # type: ignore[arg-type]
        now = time.monotonic()
        request.started = time.perf_counter()
        request.deadline = None if timeout is None else now + timeout
        request.first_token_deadline = None if first_token_timeout is None else now + first_token_timeout
        call = Call(
            tuple(ids), params, speculation, __version__, self.description.identity.tokens, priority, timeout,
            first_token_timeout, tenant, cache_salt, session, keep_trees,
        )  # fmt: skip
        text = reader_of(self.tokenizer, ids, params)
        submission = Submission(request, self.tokenizer, text, self, listener=on_output)
        if not self._lines:
            self._progress = now
        self._lines[request] = _Line(request, call)
        submission.start()
        return submission

    def add(self, requests: Sequence[Request], limited: bool = False) -> None:
        """Send the requests of `submit`, and wait until replicas have taken them. Raises what they raise."""
        for request in requests:
            line = self._lines[request]
            asyncio.run_coroutine_threadsafe(self._begin(line), self._loop).result()
            line.taken.result()

    def abort(self, request: Request) -> None:
        """End a request with the reason `abort`. Does nothing if it has ended."""
        if (line := self._lines.get(request)) is not None:
            self._cancel(line)

    def _cancel(self, line: _Line) -> None:
        if line.task is not None:
            self._loop.call_soon_threadsafe(line.task.cancel)

    async def _begin(self, line: _Line) -> None:
        line.task = asyncio.create_task(self._follow(line))

    async def _follow(self, line: _Line) -> None:
        """Work on a request until it ends, on one replica after another if they die."""
        update = Update(finish_reason="abort")
        try:
            async with asyncio.timeout_at(_end(line.request.due)) as line.limit:
                while not await self._ended(line):
                    await self._wait(line)
                return
        except TimeoutError:  # no replica ended it in time
            update = Update(finish_reason="timeout")
        except asyncio.CancelledError:
            if self._closed:
                update = Update(finish_reason="error", error=UsageError("this gateway is closed", "open it again"))
        except RedraftError as error:
            update = Update(finish_reason="error", error=error)
        except Exception as error:  # noqa: BLE001 - a fault of ours: callers must not wait for ever
            _LOG.exception("a request failed at the gateway")
            update = Update(finish_reason="error", error=as_redraft_error(error, "the gateway failed"))
        finally:
            self._lines.pop(line.request, None)
        if line.taken.done() or update.error is None:
            self._deliver(line, update)
        if not line.taken.done():
            line.taken.set_exception(update.error) if update.error else line.taken.set_result(None)

    async def _ended(self, line: _Line) -> bool:
        """Let a replica work on a request. Returns false if the replica has died or has no space.

        Raises RedraftError if the request fails, or if too many replicas have died with it.
        """
        try:
            async with aclosing(self._replicas.run(line.call)) as answers:
                async for answer in answers:
                    self._progress = time.monotonic()
                    if isinstance(answer, Started):
                        self._start(line, answer)
                    elif isinstance(answer, Update):
                        self._deliver(line, answer)
                        if answer.finish_reason is not None:
                            return True
                    elif not (line.taken.done() and isinstance(answer.error, QueueFull)):
                        raise answer.error
                    else:
                        return False
            raise ReplicaDied
        except ReplicaDied as death:
            if not line.replica:  # it had not begun
                return False
            self.calls_lost = (self.calls_lost or 0) + 1
            self._alive.discard(line.replica)
            line.deaths += 1
            _LOG.warning("replica %s died with a request after %d tokens", line.replica, len(line.request.new_tokens))
            if line.deaths > self._retries:
                raise BackendError(f"{line.deaths} replicas died while they worked on this request") from death
            return False

    async def _wait(self, line: _Line) -> None:
        """Let a request go on after its tokens."""
        request, now = line.request, time.monotonic()
        left = None if request.deadline is None else max(request.deadline - now, 0.001)
        first = request.first_token_deadline
        line.predicted = _counts(request)
        line.replica, request.slot = "", -1
        line.call = replace(
            line.call, written=tuple(request.new_tokens), timeout=left,
            first_token_timeout=None if first is None or request.new_tokens else max(first - now, 0.001),
        )  # fmt: skip
        await asyncio.sleep(_RETRY_SECONDS)

    def _start(self, line: _Line, started: Started) -> None:
        if line.texts != started.texts and line.request.new_tokens:
            raise BackendError(
                "the replica is gone, and another one would write another text", "send the request again"
            )
        line.replica, line.texts = started.replica, started.texts
        line.request.fingerprint = started.fingerprint
        self._alive.add(started.replica)
        if not line.taken.done():
            line.taken.set_result(None)

    def _deliver(self, line: _Line, update: Update) -> None:
        """Bring a request to the state that a replica tells of, and hand its output on."""
        request = line.request
        if update.token_ids:
            if not request.first_token:
                request.first_token, request.cached_tokens = time.perf_counter(), update.cached_tokens
                request.admitted = request.started + update.waited
            request.slot, request.num_computed_tokens = 0, update.rows
            request.append(update.token_ids)
            if line.limit is not None and request.first_token_deadline is not None:
                line.limit.reschedule(_end(request.due))
            if request.sampler.logprobs is not None:
                request.sampler.logprobs += update.logprobs
            self._latest[line.replica] = update
        if update.drafted is not None:
            request.counters.count(update.drafted, update.accepted)
        if any(update.predicted):
            text = request.drafting.setdefault("prediction", PredictedText((), 0))
            text.accepted, text.rejected = map(sum, zip(line.predicted, update.predicted, strict=True))
        request.finish_reason, request.error = update.finish_reason, update.error
        if request.deliver is not None:
            try:
                request.deliver(RequestOutput(request, update.token_ids, update.step, update.finish_reason))
            except Exception:  # noqa: BLE001 - a caller's function; nobody else may lose an output by it
                _LOG.exception("a request's callback raised")


def _end(due: float | None) -> float | None:
    """Return the time of the event loop's clock at which a request has to be over; its replica ends it before."""
    return None if due is None else due + _LATE_SECONDS


def _counts(request: Request) -> tuple[int, int]:
    """Return the drafted tokens of a request's prediction that were accepted, and that were rejected."""
    text = request.drafting.get("prediction")
    return (0, 0) if text is None else (text.accepted, text.rejected)
