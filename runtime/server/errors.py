"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import fields
from typing import Any

from starlette.responses import JSONResponse

from redraft.errors import RedraftError, UsageError
from redraft.runtime.generation import RequestError
from redraft.runtime.loop.scheduler import QueueFull, RequestOutput
from redraft.runtime.params import SamplingParams

_LOG = logging.getLogger("redraft.server")
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
_PATH = re.compile(
    r"(?<![\w/.<])(?:~|\.\.?)?/[^\s'\",;:)]*[^\s'\",;:.)]"
    r"|(?<![\w/.<-])[\w.-]+/(?:[\w.-]+/[^\s'\",;:)]*[^\s'\",;:.)]|[\w.-]*\.[A-Za-z]\w*)"
)
"""Texts that may be paths of the machine: absolute ones, and relative ones with two slashes or a suffix."""
_NAMES = frozenset(one.name for one in fields(SamplingParams))
_LONGEST = 600
"""Characters of a message or a name. A longer one repeats what the client sent."""


class ApiError(Exception):
    """An answer that is an error. The message of a server's fault (5xx) loses the paths of this machine.

    param: the field that is wrong, if there is one.   code: a word for programs.
    retry_after: seconds after which the client may try again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = _shortened(without_paths(message) if status >= 500 else message)
        self.param = param and _shortened(param)
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(math.ceil(self.retry_after), 1))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def wrong(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that is wrong."""
    return ApiError(400, message, param, code)


def refused(param: str, what: str = "") -> ApiError:
    """Return the error of a field, or of a value of it, that the server knows and does not support."""
    return wrong(f"{param}{what} is not supported by this server", param, "unsupported_parameter")


def unavailable(message: str, code: str) -> ApiError:
    """Return the error of a server that takes no requests now."""
    return ApiError(503, message, code=code, retry_after=1)


def fault(error: Exception, request: str) -> ApiError:
    """Return the answer for any error, and log one that nobody foresaw. request: the id of the answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RedraftError):
        return api_error(error)
    _LOG.error("%s failed by a fault of the server", request, exc_info=error)
    return ApiError(500, "the server failed", code="internal_error")


def api_error(error: RedraftError) -> ApiError:
    """Return the answer for an error of the runtime. It names a field that its message begins with, and no path."""
    if isinstance(error, QueueFull):
        return ApiError(429, without_paths(error.message), code="queue_full", retry_after=error.wait_seconds or 1)
    if isinstance(error, UsageError) and not isinstance(error, RequestError):
        first = error.message.partition(" ")[0]
        return wrong(without_paths(str(error)), first if first in _NAMES else None)
    return ApiError(500, str(error), code="request_failed")


def failure_of(output: RequestOutput) -> ApiError | None:
    """Return the error of a request whose last output this is; None if it ended as it should, or has not ended."""
    if output.finish_reason == "timeout":
        if not output.request.new_tokens and output.request.due == output.request.first_token_deadline:
            return ApiError(504, "no token came within the time that this server allows", code="first_token_timeout")
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    if output.finish_reason == "abort":
        return unavailable("the server is shutting down", "shutting_down")
    if output.finish_reason == "error":
        error = output.request.error
        return ApiError(500, str(error or "the request failed"), code="request_failed")
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def without_paths(text: str) -> str:
    """Return the text with `…` in place of everything that may be a path of this machine."""
    return _PATH.sub("…", text)
