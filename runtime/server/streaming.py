"""An answer over HTTP: whole, or as server-sent events. A client that leaves ends its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from redraft.errors import UsageError
from redraft.runtime.server.errors import ApiError, failure_of, fault
from redraft.runtime.server.rendering import Event, Json, Rendering
from redraft.runtime.server.service import Service
from redraft.runtime.submission import Submission, Written

Output = tuple[int, Written]
"""An output with the number of its submission."""
Outputs = AsyncGenerator[Output]
_Found = TypeVar("_Found")
CLIENT_LEFT = 499
"""Status of an answer that nobody receives."""


@dataclass(frozen=True)
class Answer:
    """The answer to one HTTP request: its submissions, and its form."""

    service: Service
    submissions: Sequence[Submission]
    rendering: Rendering

    async def respond(self, request: HttpRequest, stream: bool) -> Response:
        """Return the response. The submissions end with it, or when the client leaves.

        With a limit of the time to the first token, a stream begins with that token: before, it may still get a status.
        Raises ApiError.
        """
        outputs, begun = self._outputs(), False
        try:
            if not stream:
                found = await _unless_left(request, self.whole(outputs))
                return Response(status_code=CLIENT_LEFT) if found is None else JSONResponse(found)
            if self.service.settings.first_token_timeout is not None:
                first = await _unless_left(request, anext(outputs))
                if first is None:
                    return Response(status_code=CLIENT_LEFT)
                outputs = _chained(first, outputs)
            begun = True
            return _EventStream(self, outputs)
        except Exception as error:
            raise fault(error, self.rendering.id) from error
        finally:
            if not begun:
                self.close()

    def close(self) -> None:
        """End the submissions that have not ended."""
        self.service.release(self.submissions)

    async def whole(self, outputs: Outputs) -> Json:
        """Return the whole answer. Raises ApiError if one of its requests failed."""
        async with aclosing(outputs):
            async for number, written in outputs:
                self.rendering.push(number, written)
        return self.rendering.whole()

    async def events(self, outputs: Outputs) -> AsyncGenerator[ServerSentEvent]:
        """Yield all events. Those of an error are the last ones, also of one that nobody foresaw."""
        try:
            async with aclosing(self._rendered(outputs)) as events:
                async for event in events:
                    yield _sent(event)
        except Exception as error:  # noqa: BLE001 - a client cannot read a connection that breaks
            for event in self.rendering.fail(fault(error, self.rendering.id)):
                yield _sent(event)

    async def _rendered(self, outputs: Outputs) -> AsyncGenerator[Event]:
        """Yield the events of the outputs. Raises ApiError if one of the requests failed."""
        for event in self.rendering.begin():
            yield event
        async with aclosing(outputs):
            async for number, written in outputs:
                for event in self.rendering.push(number, written):
                    yield event
        for event in self.rendering.end():
            yield event

    async def _outputs(self) -> Outputs:
        """Yield the outputs of all submissions as `_merged` does. Raises ApiError if one failed, and if none comes."""
        async with aclosing(_merged(self.submissions, self.service.seconds_to_stall)) as outputs:
            async for number, written in outputs:
                if failure := failure_of(written.output):
                    raise failure
                yield number, written


class _EventStream(EventSourceResponse):
    """Server-sent events of an answer, whose submissions end with it, however it ends."""

    def __init__(self, answer: Answer, outputs: Outputs) -> None:
        super().__init__(answer.events(outputs), sep="\n")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _chained(first: Output, others: Outputs) -> Outputs:
    """Yield the first output, and then the others."""
    async with aclosing(others):
        yield first
        async for output in others:
            yield output


async def _merged(submissions: Sequence[Submission], seconds_to_stall: Callable[[], float]) -> Outputs:
    """Yield the outputs of all submissions as they come, with the submission's number, until all have ended.

    Raises the error of a submission that cannot be read, and ApiError (500) if the decode loop stalls.
    """
    queue: asyncio.Queue[Output | Exception] = asyncio.Queue()

    async def pump(number: int, submission: Submission) -> None:
        try:
            async with aclosing(submission.written()) as outputs:
                async for written in outputs:
                    queue.put_nowait((number, written))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            queue.put_nowait(error)

    async def watch() -> None:
        with suppress(UsageError):  # a runtime that is closed ends its requests
            while (seconds := seconds_to_stall()) > 0:
                await asyncio.sleep(seconds)
            queue.put_nowait(ApiError(500, "no step has made progress for too long", code="no_progress"))

    tasks = [asyncio.create_task(pump(number, one)) for number, one in enumerate(submissions)]
    left = len(tasks)
    tasks.append(asyncio.create_task(watch()))
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            left -= found[1].output.finish_reason is not None
            yield found
    finally:
        for task in tasks:
            task.cancel()


async def _unless_left(request: HttpRequest, work: Coroutine[Any, Any, _Found]) -> _Found | None:
    """Return the result of `work`; None, with `work` cancelled, if the client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()


def _sent(event: Event) -> ServerSentEvent:
    """Return an event as it is sent, with JSON in ASCII: some clients also end a line at U+0085, U+2028 and U+2029."""
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, separators=(",", ":"))
    return ServerSentEvent(data, event=event.name, sep="\n")
