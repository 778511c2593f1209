"""A submitted request: wait for its result, read its text as it comes, or abort it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Protocol

from redraft.errors import UsageError
from redraft.runtime.generation import Generation, Origin, Piece, RequestError, generation_of, origins
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import Request
from redraft.runtime.text.tokenizer import Detokenizer, Tokenizer

Listener = Callable[[RequestOutput], None]


class Written(NamedTuple):
    """One output of the loop, and the text that is final with it, which may be empty.

    pieces: the text by token. One more follows if the request ends with text that it held back, and without a token.
    """

    text: str
    output: RequestOutput
    pieces: tuple[Piece, ...] = ()


class RequestLoop(Protocol):
    """What works on requests: the thread of a decode loop, or a gateway to others."""

    def add(self, requests: Sequence[Request], limited: bool = False) -> None:
        """Begin to work on requests."""

    def abort(self, request: Request) -> None:
        """End a request. Does nothing if it has ended."""


class Submission:
    """A request that the decode loop works on. All methods may be called from any thread.

    Iterate over it, once, for its text: `for chunk in submission`, or `async for`. The joined chunks are the result's
    text. A slow reader delays nobody.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, text: Detokenizer, loop: RequestLoop,
        synthetic: bool = False, listener: Listener | None = None,
    ) -> None:  # fmt: skip
        """text: of its reader.   listener: called in the loop's thread with each output; it must return soon."""
        self.request = request
        self._tokenizer = tokenizer
        self._text = text
        self._loop = loop
        self._added = False
        self._synthetic = synthetic
        self._listener = listener
        for token in request.new_tokens:  # of a resumed request
            text.push(token)
        text.take()
        self._outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._wake: list[Callable[[], object]] = []
        self._read = False
        request.deliver = self._deliver

    def start(self, limited: bool = False) -> None:
        """Add the request to the loop, unless that is done. Raises the errors of `RequestLoop.add`."""
        with self._lock:
            if self._added or self.done():
                return
            self._loop.add([self.request], limited)
            self._added = True

    def done(self) -> bool:
        """Return true if it has ended."""
        return self._ended.is_set()

    def abort(self) -> None:
        """End it before the next step, with the reason `abort`. Does nothing if it has ended."""
        if not self.done():
            self._loop.abort(self.request)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end, and return the result. Raises TimeoutError, and RequestError if it failed."""
        self.start()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not ended after {timeout} seconds")
        generation = self.generation
        if generation.error is not None:
            raise RequestError([generation])
        return generation

    def ended(self) -> Generation:
        """Wait for the end, and return the result, failed or not."""
        self._ended.wait()
        return self.generation

    @property
    def generation(self) -> Generation:
        """The result of a request that has ended, failed or not."""
        return generation_of(self.request, self._tokenizer, self._synthetic)

    def __await__(self) -> Any:
        """Wait for the end in an event loop, and return the result. Raises RequestError if it failed."""
        self.start()
        return self._awaited().__await__()

    def __iter__(self) -> Iterator[str]:
        """Yield text as soon as it is final. Raises RequestError after the last text of a request that failed."""
        return (piece.text for piece in self.pieces() if piece.text)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield text as `__iter__` does, in an event loop. Leaving the loop early aborts the request."""
        async with aclosing(self.written()) as outputs:
            async for written in outputs:
                if written.text:
                    yield written.text
        self.result()

    async def written(self) -> AsyncGenerator[Written]:
        """Yield each output with its text, in an event loop. The last one has the reason of the end.

        A request that failed raises nothing here. Closing the iterator aborts the request.
        """
        self._begin()
        try:
            while True:
                for output in await self._next_outputs():
                    pieces = tuple(self._pieces(output))
                    yield Written("".join([piece.text for piece in pieces]), output, pieces)
                    if output.finish_reason is not None:
                        return
        finally:
            self.abort()

    def pieces(self) -> Iterator[Piece]:
        """Yield the text of each token with its origin, as iteration does. Closing the iterator aborts the request."""
        self._begin()
        return self._all_pieces()

    def _all_pieces(self) -> Iterator[Piece]:
        try:
            while True:
                output = self._outputs.get()
                yield from self._pieces(output)
                if output.finish_reason is not None:
                    self.result()
                    return
        finally:
            self.abort()

    def _begin(self) -> None:
        with self._lock:
            if self._read:
                raise UsageError("a submission's text can be read once", "keep the text, or call result()")
            self._read = True
        self.start()

    def _pieces(self, output: RequestOutput) -> Iterator[Piece]:
        made = output.token_ids
        known = [] if output.step is None else origins(output.step)
        for number, token in enumerate(made, 1):
            self._text.push(token)
            last = output.finish_reason is not None and number == len(made)
            yield Piece(self._text.take(last), known[number - 1] if number <= len(known) else Origin.VERIFIER)
        if not made and output.finish_reason is not None:
            yield Piece(self._text.take(True), Origin.VERIFIER)

    async def _awaited(self) -> Generation:
        while not self.done():
            await self._woken(self.done)
        return self.result()

    async def _next_outputs(self) -> list[RequestOutput]:
        """Return the outputs that have come, at least one."""
        while self._outputs.empty():
            await self._woken(lambda: not self._outputs.empty())
        return [self._outputs.get() for _ in range(self._outputs.qsize())]

    async def _woken(self, already: Callable[[], bool]) -> None:
        """Wait for the next output, unless what the caller waits for is there already."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._wake.append(lambda: loop.call_soon_threadsafe(event.set))
        if not already():
            await event.wait()

    def _deliver(self, output: RequestOutput) -> None:
        """Take an output, in the loop's thread."""
        self._outputs.put(output)
        if output.finish_reason is not None:
            self.request.deliver = None  # a cycle would keep engines in memory
            self._ended.set()
        with self._lock:
            wake, self._wake = self._wake, []
        for call in wake:
            with suppress(RuntimeError):  # its event loop is closed
                call()
        if self._listener is not None:
            self._listener(output)
