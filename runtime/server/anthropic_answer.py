"""An answer in the form of Anthropic's Messages: content blocks, the named events of their stream, and errors."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pydantic_core
from starlette.responses import JSONResponse

from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.parameters import Job
from redraft.runtime.server.parts import Content, Part, ToolArguments, ToolCall
from redraft.runtime.server.reading import ChatReader
from redraft.runtime.server.rendering import Event, Json
from redraft.runtime.server.service import Service
from redraft.runtime.server.usage import speculation, usage
from redraft.runtime.submission import Written

_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"),
           "tool_use": ("input_json_delta", "partial_json")}  # fmt: skip
"""Type of the delta and name of its text, by the type of the block."""
OVERLOADED = 529
"""Anthropic's status of a server that takes no requests now."""


def anthropic_error(error: ApiError) -> Json:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def anthropic_response(error: ApiError) -> JSONResponse:
    """Return the whole answer of an error, with Anthropic's status of it."""
    headers = dict(error.response().headers)
    del headers["content-length"]
    return JSONResponse(anthropic_error(error), OVERLOADED if error.status == 503 else error.status, headers)


class MessageRendering:
    """The answer to one request, as a message.

    A stream begins with the first output, when the cached tokens of the prompt are known. A block ends when the next
    one begins, or with the answer.
    """

    def __init__(self, job: Job, reader: ChatReader, service: Service) -> None:
        self._job = job
        self._reader = reader
        self._service = service
        self.id = f"msg_{uuid.uuid4().hex}"
        self._events: list[Event] = []  # that have not been returned
        self._begun = False
        self._blocks: list[Json] = []
        self._text = ""  # of the last block
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def begin(self) -> list[Event]:
        """Return nothing: the first event tells the usage of the prompt."""
        return []

    def push(self, number: int, written: Written) -> list[Event]:
        """Return the events of an output."""
        parts, _, reason = self._reader.push(written)
        if not self._begun:
            self._begun = True
            self._tell("message_start", message={**self._message(), "usage": self._usage(written=False)})
        for part in parts:
            self._add(part)
        if reason is not None:
            self._done()
            self._stop = self._reason(reason)
        events, self._events = self._events, []
        return events

    def fail(self, error: ApiError) -> list[Event]:
        """Return the event of the error."""
        return [Event(anthropic_error(error), "error")]

    def end(self) -> list[Event]:
        """Return the events with the reason of the end and the figures."""
        self._tell("message_delta", delta=self._stop, **self._figures())
        self._tell("message_stop")
        return self._events

    def whole(self) -> Json:
        """Return the message."""
        return {**self._message(), "content": self._blocks, **self._stop, **self._figures()}

    def _message(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._service.settings.model_name,
            "system_fingerprint": self._service.fingerprint,
            "content": [],
            **self._stop,
        }

    def _reason(self, reason: str) -> Json:
        """Return why the answer ended."""
        request = self._reader.request
        stop = request.text.stop if request.text is not None and reason == "stop" else None
        if reason == "length":
            is_limit = len(request.new_tokens) >= self._job.sampling.max_tokens
            found = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif stop is not None:
            found = "stop_sequence"
        else:
            found = "tool_use" if self._reader.called else "end_turn"
        return {"stop_reason": found, "stop_sequence": stop}

    def _figures(self) -> Json:
        """Return the usage, and the figures of the speculation."""
        return {
            "usage": self._usage(written=True),
            "redraft": speculation([self._reader.request], self._job.sampling.seed),
        }

    def _usage(self, written: bool) -> Json:
        """Return the tokens. Those of the prompt that were cached do not count as input.

        written: False for a message that begins.
        """
        counted = usage([self._reader.request], 1)
        cached, tokens = counted["prompt_tokens_details"]["cached_tokens"], counted["completion_tokens"]
        reasoning = self._reader.reasoning_tokens(self._service.runtime.tokenizer) if written else 0
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": tokens if written else 0,
            "output_tokens_details": {"thinking_tokens": tokens if reasoning is None else reasoning},
            "service_tier": "standard",
        }

    def _add(self, part: Part) -> None:
        """Add a part to the last block, or to a new one."""
        if isinstance(part, ToolCall):
            self._begin({"type": "tool_use", "id": self._reader.call_id(part.index), "name": part.name, "input": {}})
            return
        if not isinstance(part, ToolArguments):
            kind = "text" if isinstance(part, Content) else "thinking"
            if not self._blocks or self._blocks[-1]["type"] != kind:
                more = {"citations": None} if kind == "text" else {"signature": ""}
                self._begin({"type": kind, kind: "", **more})
        self._text += part.text
        delta, name = _DELTAS[self._blocks[-1]["type"]]
        self._tell_block("content_block_delta", delta={"type": delta, name: part.text})

    def _begin(self, block: Json) -> None:
        """Begin a block, after the end of the last one."""
        self._done()
        self._blocks.append(block)
        self._tell_block("content_block_start", content_block=dict(block))

    def _done(self) -> None:
        """End the last block, if there is one."""
        if not self._blocks:
            return
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _input(self._text)
        else:
            block[block["type"]] = self._text
        self._tell_block("content_block_stop")
        self._text = ""

    def _tell_block(self, name: str, **values: Any) -> None:
        self._tell(name, index=len(self._blocks) - 1, **values)

    def _tell(self, name: str, **values: Any) -> None:
        self._events.append(Event({"type": name, **values}, name))


def _input(text: str) -> Json:
    """Return the object of a call's arguments. If the end of the answer cuts them, it has the members that came."""
    try:
        found = pydantic_core.from_json(text, allow_partial=True)
        json.dumps(found, allow_nan=False)
    except ValueError:
        # Deeper than any parser reads, half a surrogate pair, which JSON in UTF-8 cannot have, or a number without a
        # value: 9e9999, and integers of more than 4300 digits.
        return {}
    return dict(found)
