"""A client of OpenAI's API over one connection, in Python's standard library: requests, streams, and leaving early.

It is small because it shares two cores with the server that it measures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from redraft.errors import BackendError

Json = dict[str, Any]
_DATA, _DONE = b"data:", b"[DONE]"


class Refused(BackendError):
    """The server answered with an error: another status than 200, or an event. error: its object `error`."""

    def __init__(self, status: int, error: Json) -> None:
        super().__init__(f"status {status}: {error.get('message', 'no reason')}")
        self.status = status


class Client:
    """A connection to a server. Use it in one thread. It connects again after it was closed."""

    def __init__(self, url: str, seconds: float = 600) -> None:
        """url: without `/v1`.   seconds: that the server may stay silent."""
        parts = urlsplit(url)
        self._connection = HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=seconds)

    def __enter__(self) -> Client:
        """Return itself, which is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. A request whose answer has not been read ends."""
        self._connection.close()

    def get(self, path: str) -> str:
        """Return the text of a page. Raises Refused and BackendError."""
        return self._answer("GET", path, None).read().decode()

    def send(self, path: str, fields: Mapping[str, Any]) -> None:
        """Send a request whose answer nobody will read: `close` then leaves it. Raises BackendError."""
        try:
            self._request("POST", path, fields)
        except (OSError, HTTPException) as error:
            raise BackendError(f"the connection failed: {error or type(error).__name__}") from None

    def ask(self, path: str, fields: Mapping[str, Any]) -> Json:
        """Return the whole answer to a request. Raises Refused and BackendError."""
        found: Json = json.loads(self._answer("POST", path, fields).read())
        return found

    def events(self, path: str, fields: Mapping[str, Any]) -> Iterator[tuple[float, Json]]:
        """Yield each event of a streamed answer, with the seconds of `time.perf_counter` when it came.

        Raises Refused, also for an event that is an error, and BackendError if the connection ends too early.
        """
        answer = self._answer("POST", path, {**fields, "stream": True})
        try:
            while line := answer.readline():
                if not line.startswith(_DATA):
                    continue
                now, data = time.perf_counter(), line[len(_DATA) :].strip()
                if data == _DONE:
                    answer.read()  # else the connection cannot be used again
                    return
                event: Json = json.loads(data)
                if "error" in event:
                    raise Refused(200, event["error"])
                yield now, event
        except (OSError, HTTPException) as error:
            raise BackendError(f"the stream broke: {error or type(error).__name__}") from None
        raise BackendError("the stream ended without [DONE]")

    def _answer(self, method: str, path: str, fields: Mapping[str, Any] | None) -> HTTPResponse:
        """Return an answer whose status is 200. Raises Refused and BackendError."""
        is_used = self._connection.sock is not None
        try:
            try:
                answer = self._sent(method, path, fields)
            except ConnectionError:
                if not is_used:
                    raise
                self.close()  # llama.cpp's server closes a connection after a stream, and does not say so
                answer = self._sent(method, path, fields)
            if answer.status == 200:
                return answer
            text = answer.read()
        except (OSError, HTTPException) as error:
            self.close()
            raise BackendError(f"the connection failed: {error or type(error).__name__}") from None
        found: Json = {}
        with suppress(ValueError, KeyError, TypeError):
            found = dict(json.loads(text)["error"])
        raise Refused(answer.status, found)

    def _sent(self, method: str, path: str, fields: Mapping[str, Any] | None) -> HTTPResponse:
        self._request(method, path, fields)
        return self._connection.getresponse()

    def _request(self, method: str, path: str, fields: Mapping[str, Any] | None) -> None:
        body = None if fields is None else json.dumps(fields).encode()
        self._connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
