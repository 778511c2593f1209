"""The thread of a decode loop. It lives while there are requests; others add, abort and wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from redraft.errors import RedraftError, UsageError
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import Request, as_redraft_error

_LOG = logging.getLogger("redraft.runtime")


class LoopThread:
    """Runs the steps of `loop` in a thread of its own, which starts with the first request and ends with the last."""

    def __init__(self, loop: DecodeLoop) -> None:
        self.loop = loop
        self.steps = 0
        self.within: AbstractContextManager[object] = nullcontext()
        """The block of each step and of its deliveries."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._visitors = 0
        self._visiting = threading.RLock()
        self._stepping = False
        self._closed = False
        self._dead: RedraftError | None = None

    def add(self, requests: Sequence[Request], limited: bool = False) -> None:
        """Add requests, which call `deliver` for each output in the loop's thread.

        Raises QueueFull, and UsageError after `close` or if the thread has died.
        """
        with self._changed:
            self.check()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="redraft decode loop", daemon=True)
                thread.start()  # it waits for this lock
                self._thread = thread
            for request in requests:
                self.loop.add(request, limited)
            self._changed.notify_all()

    def abort(self, request: Request) -> None:
        """End a request before the next step. Does nothing if it has ended."""
        with self._changed:
            if not self._closed:
                self.loop.scheduler.abort(request)

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Wait until no step runs, and let none begin in the block. Yields true if no request has a slot.

        In the loop's own thread, where callbacks run between two steps, there is nothing to wait for.
        """
        if threading.current_thread() is self._thread:
            yield not self.loop.scheduler.slots.used
            return
        with self._changed:
            self.check()
            self._visitors += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._stepping)
                self.check()
            with self._visiting, self.loop.paused():
                yield not self.loop.scheduler.slots.used
        finally:
            with self._changed:
                self._visitors -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End all requests with an error, and the thread. Closing again does nothing."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
            if thread is threading.current_thread():
                return
            self._changed.wait_for(lambda: not self._visitors)
        if thread is not None:
            thread.join()
        self.__dict__.pop("loop", None)  # it holds the engines

    def check(self) -> None:
        """Raise UsageError if the thread takes no more requests: after `close`, or if it has died."""
        if self._closed:
            raise _closed()
        if self._dead is not None:
            raise UsageError("the decode loop has died", "read the log, and open the runtime again") from self._dead

    def _run(self) -> None:
        """Step until no request is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._visitors)
                if self._closed:
                    self._deliver(self.loop.scheduler.end_all(_closed()))
                if self._closed or not self.loop.busy:
                    self._thread = None
                    return
                self._stepping = True
            try:
                with self.within:
                    outputs = self.loop.step()
                    self.steps += 1
                    self._deliver(outputs)
            except BaseException as error:  # noqa: BLE001 - a fault of ours: callers must not wait for ever
                _LOG.exception("the decode loop failed")
                with self._changed:
                    recovered = self._recover(as_redraft_error(error, "the decode loop failed"))
                    self._stepping = False
                    self._changed.notify_all()
                    if not recovered:
                        self._thread = None
                        return
            else:
                with self._changed:
                    self._stepping = False
                    self._changed.notify_all()

    def _recover(self, error: RedraftError) -> bool:
        """End the requests that a fault concerns. Return false, and end all, if the loop cannot go on."""
        self.loop.note(error)
        try:
            ended = self.loop.scheduler.end_concerned(error)
        except BaseException:  # noqa: BLE001 - a fault of ours, as above
            _LOG.exception("the decode loop died")
            ended = []
        if not ended:  # the same fault would come again
            self._dead = error
            ended = self.loop.scheduler.end_all(error)
        self._deliver(ended)
        return self._dead is None

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.request.deliver is not None:
                try:
                    output.request.deliver(output)
                except BaseException:  # noqa: BLE001 - a caller's function; nobody else may lose an output by it
                    _LOG.exception("a request's callback raised")


def _closed() -> UsageError:
    return UsageError("this runtime is closed", "open it again")
