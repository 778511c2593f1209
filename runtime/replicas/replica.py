"""The side of a replica: a runtime that answers the calls of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from redraft.errors import BackendError, RedraftError, UsageError
from redraft.runtime.api import Runtime
from redraft.runtime.drafters.chain_lookups import PredictedText
from redraft.runtime.generation import recorded
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.replicas.calls import (
    Answer,
    Call,
    Description,
    Gone,
    Identity,
    Refused,
    Started,
    Update,
    check_identity,
)
from redraft.runtime.requests.batch import RequestStep
from redraft.runtime.submission import Listener, Submission


class Replica:
    """A runtime with a name, which is unique among the replicas of a gateway.

    identity: of its bundle and kernels.
    progress_timeout: seconds without a step, while requests wait, after which it counts as broken.
    """

    def __init__(self, runtime: Runtime, name: str, identity: Identity, progress_timeout: float = 30.0) -> None:
        self.runtime = runtime
        self.name = name
        self.identity = identity
        self._progress_timeout = progress_timeout
        self._fingerprint = runtime.fingerprint

    def describe(self) -> Description:
        """Return what its gateway has to know."""
        runtime = self.runtime
        return Description(
            self.identity, self._fingerprint, runtime.methods, runtime.default_method, runtime.vocabulary,
            runtime.slots,
        )  # fmt: skip

    def load(self) -> dict[str, float]:
        """Return the requests that run, and the tokens of those that wait for a slot."""
        waiting = [request for request in self.runtime.running if request.slot < 0]
        health = self.runtime.health
        return {
            "running_requests": float(health.requests - len(waiting)),
            "waiting_tokens": float(sum(request.prompt_length for request in waiting)),
        }

    def check(self) -> None:
        """Raise RedraftError if the runtime cannot go on, so that another process has to take its place."""
        self.runtime.check_running()
        if (idle := self.runtime.health.idle_seconds) > self._progress_timeout:
            raise BackendError(f"no step has made progress for {idle:.0f} s")

    async def run(self, call: Call) -> AsyncGenerator[Answer]:
        """Yield that the call has been taken, or why not, and then each output. Closing it ends the request."""
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update]()

        def send(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, self._update(output, call.keep_trees))

        # In a thread: a drafter may open, or a grammar compile, while other streams go on.
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, call, send))
        try:
            submission = await asyncio.shield(submitting)
        except RedraftError as error:
            yield Gone() if self._is_dead() else Refused(error)
            return
        except asyncio.CancelledError:
            submitting.add_done_callback(_abort)
            raise
        try:
            yield Started(self.name, self.identity.texts, self._fingerprint)
            while True:
                update = await updates.get()
                if update.finish_reason == "error" and self._is_dead():
                    yield Gone()
                    return
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            submission.abort()

    def _is_dead(self) -> bool:
        """Return true if the runtime takes no more requests."""
        try:
            self.runtime.check_running()
        except UsageError:
            return True
        return False

    def _submit(self, call: Call, send: Listener) -> Submission:
        check_identity(self.name, self.identity, call.version, call.tokens)
        return self.runtime.submit(
            call.prompt, call.params, call.speculation, priority=call.priority, timeout=call.timeout,
            first_token_timeout=call.first_token_timeout, tenant=call.tenant, cache_salt=call.cache_salt,
            on_output=send, keep_trees=call.keep_trees,
            written=call.written,
        )  # fmt: skip

    def _update(self, output: RequestOutput, with_step: bool) -> Update:
        """Return an output as it is sent, in the loop's thread."""
        request, count = output.request, len(output.token_ids)
        step = output.step if isinstance(output.step, RequestStep) else None
        logprobs, end = request.sampler.logprobs, len(request.new_tokens) - request.resumed
        predicted = next((one for one in request.drafting.values() if isinstance(one, PredictedText)), None)
        outcome = None if step is None else step.outcome
        return Update(
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            error=request.error,
            logprobs=() if logprobs is None else tuple(logprobs[end - count : end]),
            drafted=None if step is None or outcome is None else len(step.tree) - 1,
            accepted=0 if outcome is None else min(count, len(outcome.path)),
            predicted=(0, 0) if predicted is None else (predicted.accepted, predicted.rejected),
            waited=max(request.admitted - request.started, 0.0),
            rows=request.num_computed_tokens,
            cached_tokens=request.cached_tokens,
            kv_usage=self.runtime.health.kv_usage,
            gain=self.runtime.gain,
            step=recorded(step) if with_step else None,
        )


def _abort(submitting: asyncio.Future[Submission]) -> None:
    """End a request for which nobody waits any more."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().abort()
