"""What a server notes of an HTTP request: its id, what it asked for, and what it took."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from redraft.runtime.server.parameters import Job
from redraft.runtime.submission import Submission

REQUEST_ID = "X-Request-Id"
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_CURRENT: ContextVar[RequestRecord | None] = ContextVar("redraft_request", default=None)


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request.

    id:       the client's `X-Request-Id` if it is a word of at most 128 letters, digits and `._:-`; else a new one.
    started_ns, started: seconds since 1970, in nanoseconds, and of `time.perf_counter`, when its headers had come.
    status:   of the response; None before it.   error: the error's code, if there is one.
    submissions, job: the requests of the decode loop, and what they ask for. None of them for other endpoints.
    """

    id: str
    verb: str
    path: str
    client: str
    started_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    error: str | None = None
    submissions: list[Submission] = field(default_factory=list)
    job: Job | None = None

    def submitted(self, submissions: Sequence[Submission], job: Job) -> None:
        """Note the requests of the decode loop."""
        self.submissions += submissions
        self.job = job

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response that tell the id. Anthropic's clients have their own name for it."""
        names = (REQUEST_ID, "request-id") if self.path.startswith("/v1/messages") else (REQUEST_ID,)
        return dict.fromkeys(names, self.id)

    @property
    def finish_reasons(self) -> list[str]:
        """Why each request of the loop ended. Those that run still have been aborted."""
        return [str(one.request.finish_reason or "abort") for one in self.submissions]

    @property
    def error_type(self) -> str | None:
        """The error's code, or the reason of the end of a request that failed after its answer had begun."""
        return self.error or next((reason for reason in self.finish_reasons if reason in ("error", "timeout")), None)

    def figures(self) -> dict[str, Any]:
        """Return what the requests of the loop took: tokens, steps, and the seconds to the first token.

        They may still run, if their client has left. Returns nothing for endpoints without such requests.
        """
        requests = [one.request for one in self.submissions]
        if self.job is None or not requests:
            return {}
        prompts, counters = requests[:: self.job.choices], [request.counters for request in requests]
        first = min((request.first_token for request in requests if request.first_token), default=None)
        return {
            "prompt_tokens": sum(request.prompt_length for request in prompts),
            "completion_tokens": sum(len(request.new_tokens) for request in requests),
            "cached_tokens": sum(request.cached_tokens for request in prompts),
            "first_token_seconds": None if first is None else first - self.started,
            "method": requests[0].speculation.method,
            "steps": sum(one.steps for one in counters),
            "drafted": sum(one.drafted for one in counters),
            "accepted": sum(one.accepted for one in counters),
        }


def begin_record(scope: Scope) -> RequestRecord:
    """Return a new record of the request whose task this is."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    address = scope.get("client")
    record = RequestRecord(
        given if _ID.fullmatch(given) else uuid.uuid4().hex, scope["method"], scope["path"],
        address[0] if address else "",
    )  # fmt: skip
    _CURRENT.set(record)  # each request has a task of its own, whose end drops it
    return record


def current_record() -> RequestRecord | None:
    """Return the record of the request that this task answers."""
    return _CURRENT.get()
