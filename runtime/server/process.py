"""A server as a process, or in a thread of one: uvicorn, which a signal drains before it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from redraft.errors import BackendError, UsageError
from redraft.runtime.server.app import create_app
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.reloading import DrafterReload
from redraft.runtime.server.served import Served
from redraft.runtime.server.service import Service
from redraft.runtime.server.settings import ServerSettings

MOST_HEADER_BYTES = 64 << 10
"""Bytes of a request before its body."""
_CLOSING_SECONDS = 5
"""Time for answers to leave after their requests have ended."""
_START_SECONDS = 60


def bound_socket(settings: ServerSettings) -> socket.socket:
    """Return a socket at the server's address, on which nobody listens yet. Raises UsageError if that fails."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        message = f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}"
        raise UsageError(message, "give another --port or --host") from None
    return sock


class LimitedHeaders(HttpToolsProtocol):
    """A connection that ends with status 431 when a request has too many bytes before its body.

    httptools has no limit of its own. uvicorn's other parser, h11, has one, but it is written in Python, and each chunk
    of every stream would pass through it.
    """

    _unfinished = 0  # bytes of a request whose body has not begun
    _in_body = False

    def data_received(self, data: bytes) -> None:
        """Parse at most the bytes that the request may still have before its body, then the others."""
        while data and not self.transport.is_closing():
            end = len(data) if self._in_body else MOST_HEADER_BYTES - self._unfinished
            piece, data = data[:end], data[end:]
            self._unfinished += 0 if self._in_body else len(piece)
            super().data_received(piece)
            if self._unfinished >= MOST_HEADER_BYTES:
                self._refuse()

    def on_headers_complete(self) -> None:
        """Begin the request. Bytes that follow are its body."""
        self._unfinished, self._in_body = 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request's body."""
        self._in_body = False
        super().on_message_complete()

    def _refuse(self) -> None:
        error = ApiError(431, f"the headers have more than {MOST_HEADER_BYTES} bytes", code="headers_too_large")
        body = bytes(error.response().body)
        head = f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """Runs the application until SIGTERM or SIGINT. Then it takes no new requests, and running ones have
    `drain_timeout` seconds to end. A second signal ends these at once, a third one the process."""

    def __init__(self, app: FastAPI, settings: ServerSettings, started: Callable[[str], None]) -> None:
        """started: called with the server's URL once it listens."""
        config = uvicorn.Config(
            app, http=LimitedHeaders, log_config=None, log_level="warning", access_log=False, server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSING_SECONDS,
        )  # fmt: skip
        super().__init__(config)
        self.service: Service = app.state.service
        self._reload: DrafterReload | None = getattr(app.state, "reload", None)
        self._drain_seconds = settings.drain_timeout
        self._deadline: float | None = None
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets, and tell the URL of the first."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        if self._reload is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload.begin)
        self._started(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain. If it drains already, end the time of running requests; if that is over, end at once."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._drain_seconds
        elif now < self._deadline:
            self._deadline = now
        else:
            self.should_exit = self.force_exit = True
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Let uvicorn end once all answers have ended, or their time is over."""
        if self._deadline is not None:
            late = time.monotonic() - self._deadline
            if late > 0:
                self.service.abort_all()
            if not self.service.open_answers or late > _CLOSING_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)


@contextmanager
def serve_in_thread(runtime: Served, settings: ServerSettings) -> Iterator[tuple[str, DrainingServer]]:
    """Serve a runtime from a thread of this process. Yields the URL and the server, which is drained at the end.

    Raises UsageError as `bound_socket` does, and BackendError if the server does not start.
    """
    urls, ready = list[str](), threading.Event()

    def started(url: str) -> None:
        urls.append(url)
        ready.set()

    with bound_socket(settings) as sock:
        server = DrainingServer(create_app(runtime, settings), settings, started)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            if not ready.wait(_START_SECONDS):
                raise BackendError("the server did not start")
            yield urls[0], server
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join()
