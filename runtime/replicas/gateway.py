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
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, NamedTuple, Protocol

from redraft import __version__
from redraft.engines import Bundle
from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.loop.decode_loop import Health
from redraft.runtime.loop.request_maker import bare_request, reader_of
from redraft.runtime.loop.scheduler import QueueFull
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.replicas.calls import Answer, Call, Description, Gone, Started, Update
from redraft.runtime.replicas.line import Line, Recorded
from redraft.runtime.requests.request import Request, as_redraft_error
from redraft.runtime.sampling import model_sampling
from redraft.runtime.submission import Listener, Submission
from redraft.runtime.text.tokenizer import Tokenizer
from redraft.runtime.trees.offers import Speculation

_LOG = logging.getLogger("redraft.replicas")
MAX_RETRIES = 1
"""Deaths of its replica that a request survives. The request may be what kills them."""
_RETRY_SECONDS, _MOST_TRIES = 0.05, 20
"""Time until a request is sent again, which doubles each time that no replica takes it, and so often at most."""
_PING_SECONDS, _SILENT_SECONDS = 2.0, 10.0
"""Time between two questions whether a replica answers, and without an answer until the gateway is not ready."""
_FORGET_SECONDS = 60.0
"""Time without an update after which a replica does not count as living."""
_LATE_SECONDS = 1.0
"""Time past its deadline after which a request ends here, if no replica has ended it."""


class ReplicaDied(Exception):
    """The replica of a call is gone, or its stream ended before the request.

    worked: True if it had the call, and may have died of it, though it had not said that it took the request.
    """

    def __init__(self, worked: bool = False) -> None:
        super().__init__()
        self.worked = worked


class _Seen(NamedTuple):
    """A replica: when it last worked on a request, in seconds of `time.monotonic`, and how full its rows were."""

    at: float
    kv_usage: float


class Replicas(Protocol):
    """A set of replicas."""

    async def ping(self) -> None:
        """Return when a replica has answered."""

    def run(self, call: Call) -> AsyncGenerator[Answer]:
        """Send a call to a replica, and yield its answers as `Replica.run`. Raises ReplicaDied if it dies."""


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
        self._lines: dict[Request, Line] = {}
        self._gains: dict[str, Gain] = {}
        """Of each replica that there has been."""
        self._seen: dict[str, _Seen] = {}
        self._answered = time.monotonic()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="redraft gateway", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

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
        """The state of all replicas together. Prefixes are not counted, and each replica watches its own progress."""
        lines, usage = list(self._lines.values()), [one.kv_usage for one in self._living().values()]
        waiting = sum(line.request.slot < 0 for line in lines)
        return Health(len(lines), waiting, 0, 0.0, None, sum(usage) / len(usage) if usage else 0.0)

    def unavailable(self) -> str | None:
        """Return a reason if no replica answers. Requests wait until one does, or their time is over."""
        silent = time.monotonic() - self._answered
        return None if silent < _SILENT_SECONDS else f"no replica has answered for {silent:.0f} s"

    @property
    def running(self) -> list[Request]:
        """The requests that have not ended."""
        return [line.request for line in list(self._lines.values())]

    @property
    def gain(self) -> Gain:
        """The sums over all replicas that there have been."""
        gains = list(self._gains.values())
        return Gain(sum(one.spent_ms for one in gains), sum(one.plain_ms for one in gains))

    @property
    def slots(self) -> int:
        """Requests that the replicas may run at once which have lately worked on some."""
        return self.description.slots * max(len(self._living()), 1)

    def _living(self) -> dict[str, _Seen]:
        """Return the replicas that have lately worked on requests."""
        least = time.monotonic() - _FORGET_SECONDS
        return {name: seen for name, seen in list(self._seen.items()) if seen.at > least}

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
        if self._max_waiting is not None and waiting and waiting + count > self._max_waiting + self.slots:
            raise QueueFull(waiting, None)

    def close(self) -> None:
        """End all requests with an error. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for line in list(self._lines.values()):  # they came while it closed
            line.taken.set_exception(UsageError("this gateway is closed", "open it again"))

    async def _settle(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Note when a replica has answered."""
        while True:
            with suppress(Exception):  # what the replicas raise says that none answers
                async with asyncio.timeout(_SILENT_SECONDS / 2):
                    await self._replicas.ping()
                self._answered = time.monotonic()
            await asyncio.sleep(_PING_SECONDS)

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
        self._lines[request] = Line(request, call)
        submission.start()
        return submission

    def add(self, requests: Sequence[Request], limited: bool = False) -> None:
        """Send the requests of `submit`, and wait until replicas have taken them. Raises what they raise."""
        for request in requests:
            line = self._lines[request]
            self._loop.call_soon_threadsafe(self._begin, line)
            line.taken.result()

    def abort(self, request: Request) -> None:
        """End a request with the reason `abort`. Does nothing if it has ended."""
        line = self._lines.get(request)
        if line is not None and line.task is not None and not self._closed:
            self._loop.call_soon_threadsafe(line.task.cancel)

    def _begin(self, line: Line) -> None:
        """Follow a line from now on, without the context of its HTTP request: Ray would take all its calls for one."""
        line.task = self._loop.create_task(self._follow(line), context=Context())

    async def _follow(self, line: Line) -> None:
        """Work on a request until it ends, on one replica after another if they die."""
        update = Update(finish_reason="abort")
        try:
            self.check_running()
            async with asyncio.timeout_at(_end(line.request.due)) as line.limit:
                while not await self._ended(line):
                    line.lose()
                    await asyncio.sleep(min(_RETRY_SECONDS * 2 ** (line.tries + line.refusals), _PING_SECONDS))
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
        self._lines.pop(line.request, None)
        is_refused = not line.taken.done() and update.error is not None
        if is_refused:
            line.taken.set_exception(update.error)
        elif not line.taken.done():
            line.taken.set_result(None)  # before its last output, which waits for those who wait for this
        if not line.ended and not is_refused:
            line.deliver(update)

    async def _ended(self, line: Line) -> bool:
        """Let a replica work on a request. Returns false if it has to go on with another one.

        Raises RedraftError if the request fails, or if too many replicas have died with it.
        """
        try:
            async with aclosing(self._replicas.run(line.call)) as answers:
                async for answer in answers:
                    if isinstance(answer, Started):
                        line.start(answer)
                    elif isinstance(answer, Update):
                        self._note(line, answer)
                        if line.ended:
                            return True
                    elif isinstance(answer, Gone):
                        break
                    elif not (line.taken.done() and isinstance(answer.error, QueueFull)):
                        raise answer.error
                    else:
                        line.refused()
                        return False
            raise ReplicaDied
        except ReplicaDied as death:
            self._count_death(line, death)
            return False

    def _count_death(self, line: Line, death: ReplicaDied) -> None:
        """Count a lost replica. Raises BackendError if it was one too many."""
        if not line.replica and not death.worked:
            line.tries += 1
            if line.tries >= _MOST_TRIES:
                raise BackendError(f"no replica took this request in {line.tries} tries") from death
            return
        self.calls_lost = (self.calls_lost or 0) + 1
        self._seen.pop(line.replica, None)
        line.deaths += 1
        _LOG.warning("replica %s died with a request after %d tokens", line.replica, len(line.request.new_tokens))
        if line.deaths > self._retries:
            raise BackendError(f"{line.deaths} replicas died while they worked on this request") from death

    def _note(self, line: Line, update: Update) -> None:
        """Hand an update on, and note the state of its replica."""
        if update.token_ids:
            self._answered = time.monotonic()
            self._seen[line.replica] = _Seen(self._answered, update.kv_usage)
            self._gains[line.replica] = update.gain
        line.deliver(update)
        if line.limit is not None and line.request.first_token_deadline is not None:
            line.limit.reschedule(_end(line.request.due))


def _end(due: float | None) -> float | None:
    """Return the time of the event loop's clock at which a request has to be over; its replica ends it before."""
    return None if due is None else due + _LATE_SECONDS
