"""An answer over HTTP: whole, or as server-sent events. A client that leaves ends its requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from redraft.runtime.server.answers import Choice, Json
from redraft.runtime.server.errors import failure_of
from redraft.runtime.server.service import Service
from redraft.runtime.server.usage import speculation, usage
from redraft.runtime.submission import Submission, Written

DONE = "[DONE]"
CLIENT_LEFT = 499
"""Status of an answer that nobody receives."""


@dataclass(frozen=True)
class Answer:
    """The answer to one HTTP request.

    choices: one for each submission.   per_prompt: choices of one prompt.   seed: of the first choice.
    kind, chunk_kind: value of `object` of the whole answer, and of a chunk.
    """

    service: Service
    submissions: Sequence[Submission]
    choices: Sequence[Choice]
    per_prompt: int
    seed: int
    id: str
    created: int
    kind: str
    chunk_kind: str

    async def respond(self, request: HttpRequest, stream: bool, include_usage: bool) -> Response:
        """Return the response. The submissions end with it, or when the client leaves."""
        if stream:
            return _EventStream(self, include_usage)
        try:
            found = await _unless_left(request, self.whole())
        finally:
            self.close()
        return Response(status_code=CLIENT_LEFT) if found is None else JSONResponse(found)

    def close(self) -> None:
        """End the submissions that have not ended."""
        self.service.release(self.submissions)

    async def whole(self) -> Json:
        """Return the whole answer. Raises ApiError if one of its requests failed."""
        async with aclosing(_merged(self.submissions)) as outputs:
            async for number, written in outputs:
                if failure := failure_of(written.output):
                    raise failure
                self.choices[number].push(written)
        choices = [choice.whole() for choice in self.choices]
        return {**self._envelope(self.kind, choices), **self._figures(True)}

    async def events(self, include_usage: bool) -> AsyncGenerator[str]:
        """Yield the data of every event. An error is the last one before the end."""
        # Only those who ask for usage get the field, which is null before the last chunk.
        no_usage: Json = {"usage": None} if include_usage else {}
        left = len(self.choices)
        for choice in self.choices:
            for chunk in choice.begin():
                yield self._event([chunk], no_usage)
        async with aclosing(_merged(self.submissions)) as outputs:
            async for number, written in outputs:
                if failure := failure_of(written.output):
                    yield _dumps(failure.body)
                    break
                chunks = self.choices[number].push(written)
                left -= written.output.finish_reason is not None
                for place, chunk in enumerate(chunks, 1):
                    is_last = left == 0 and place == len(chunks)
                    more = self._figures(False) if is_last and not include_usage else no_usage
                    yield self._event([chunk], more)
        if left == 0 and include_usage:
            yield self._event([], self._figures(True))
        yield DONE

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.settings.model_name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }

    def _event(self, choices: list[Json], more: Json) -> str:
        return _dumps({**self._envelope(self.chunk_kind, choices), **more})

    def _figures(self, with_usage: bool) -> Json:
        """Return the usage, and the figures of the speculation, after the last output."""
        requests = [submission.request for submission in self.submissions]
        counted = {"usage": usage(requests, self.per_prompt)} if with_usage else {}
        return {**counted, "redraft": speculation(requests, self.seed)}


class _EventStream(EventSourceResponse):
    """Server-sent events of an answer, whose submissions end with it, however it ends."""

    def __init__(self, answer: Answer, include_usage: bool) -> None:
        super().__init__(answer.events(include_usage), sep="\n")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _merged(submissions: Sequence[Submission]) -> AsyncGenerator[tuple[int, Written]]:
    """Yield the outputs of all submissions as they come, with the submission's number, until all have ended.

    Raises the error of a submission that cannot be read.
    """
    queue: asyncio.Queue[tuple[int, Written] | Exception] = asyncio.Queue()

    async def pump(number: int, submission: Submission) -> None:
        try:
            async with aclosing(submission.written()) as outputs:
                async for written in outputs:
                    queue.put_nowait((number, written))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, one)) for number, one in enumerate(submissions)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            left -= found[1].output.finish_reason is not None
            yield found
    finally:
        for task in tasks:
            task.cancel()


async def _unless_left(request: HttpRequest, work: Coroutine[Any, Any, Json]) -> Json | None:
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


def _dumps(value: Json) -> str:
    """Return JSON in ASCII: some clients also end a line at U+0085, U+2028 and U+2029, which would cut an event."""
    return json.dumps(value, separators=(",", ":"))
