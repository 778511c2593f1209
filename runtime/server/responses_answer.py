"""An answer in the form of OpenAI's Responses: output items, and the named events of their stream."""

from __future__ import annotations

import time
import uuid
from typing import Any

from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.fields import Fields
from redraft.runtime.server.parameters import Job
from redraft.runtime.server.parts import Content, Part, ToolArguments, ToolCall
from redraft.runtime.server.reading import ChatReader
from redraft.runtime.server.rendering import Event, Json
from redraft.runtime.server.responses_fields import ResponsesRequest
from redraft.runtime.server.service import Service
from redraft.runtime.server.usage import speculation, usage
from redraft.runtime.submission import Written

_FIELDS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""Names of an item's text in events, by its type."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseRendering:
    """The answer to one request, as a response.

    An item ends when the next one begins, or with the answer.
    """

    def __init__(self, asked: ResponsesRequest, job: Job, reader: ChatReader, service: Service) -> None:
        self._asked = asked
        self._job = job
        self._reader = reader
        self._service = service
        self.id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._events: list[Event] = []  # that have not been returned
        self._number = 0  # of events so far
        self._items: list[Json] = []
        self._text = ""  # of the last item
        self._logprobs: list[Json] = []  # of the last item
        self._given = 0  # tokens whose log probabilities have been written
        self._status = "in_progress"
        self._error: Json | None = None

    def begin(self) -> list[Event]:
        """Return the events that tell of the response."""
        self._tell("response.created", response=self._response())
        self._tell("response.in_progress", response=self._response())
        return self._taken()

    def push(self, number: int, written: Written) -> list[Event]:
        """Return the events of an output."""
        parts, _, reason = self._reader.push(written)
        for part in parts:
            self._add(part)
        if reason is not None:
            self._end("incomplete" if reason == "length" else "completed")
        return self._taken()

    def fail(self, error: ApiError) -> list[Event]:
        """Return the error, and the event of the response that failed."""
        self._tell("error", code=error.code, message=error.message, param=error.param)
        self._status, self._error = "failed", {"code": "server_error", "message": error.message}
        self._tell("response.failed", response=self._response())
        return self._taken()

    def end(self) -> list[Event]:
        """Return the event of the whole response."""
        self._tell(f"response.{self._status}", response=self.whole())
        return self._taken()

    def whole(self) -> Json:
        """Return the response."""
        request = self._reader.request
        counted, reasoning = usage([request], 1), self._reader.reasoning_tokens(self._service.runtime.tokenizer)
        written = counted["completion_tokens"]
        details = counted["prompt_tokens_details"] | {"cache_write_tokens": 0}
        return {
            **self._response(),
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": details,
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": written if reasoning is None else reasoning},
                "total_tokens": counted["total_tokens"],
            },
            "redraft": speculation([request], self._job.sampling.seed),
        }

    def _add(self, part: Part) -> None:
        """Add a part to the last item, or to a new one."""
        if isinstance(part, ToolCall):
            call_id = self._reader.call_id(part.index)
            self._begin("function_call", arguments="", call_id=call_id, name=part.name)
        elif isinstance(part, ToolArguments):
            self._write(part.text)
        else:
            kind = "message" if isinstance(part, Content) else "reasoning"
            if not self._items or self._items[-1]["type"] != kind:
                more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
                self._begin(kind, **more, content=[])
            self._write(part.text)

    def _begin(self, kind: str, **values: Any) -> None:
        """Begin an item, after the end of the last one."""
        if self._items:
            self._done("completed")
        item_id = f"{_PREFIXES[kind]}_{self._reader.item_id(f'item {len(self._items)}')[:32]}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **values})
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1]))
        if kind != "function_call":
            self._tell_item("response.content_part.added", part=self._part("", []))

    def _write(self, text: str) -> None:
        """Add text to the last item."""
        self._text += text
        self._tell_text("delta", delta=text, logprobs=self._new_logprobs())

    def _done(self, status: str) -> None:
        """End the last item."""
        item = self._items[-1]
        if left := self._new_logprobs():
            self._tell_text("delta", delta="", logprobs=left)
        if item["type"] == "function_call":
            item["arguments"] = self._text
            self._tell_text("done", arguments=self._text)
        else:
            part = self._part(self._text, self._logprobs)
            item["content"] = [part]
            self._tell_text("done", text=self._text, logprobs=self._logprobs)
            self._tell_item("response.content_part.done", part=part)
        item["status"] = status
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))
        self._text, self._logprobs = "", []

    def _end(self, status: str) -> None:
        """End the answer, which has an item at least."""
        if not self._items:
            self._begin("message", role="assistant", content=[])
        self._done(status)
        self._status = status

    def _new_logprobs(self) -> list[Json]:
        """Return the log probabilities of a message's tokens that have come since the last call."""
        logprobs = self._reader.logprobs
        if not logprobs.given or self._items[-1]["type"] != "message":
            return []
        skipped = self._reader.reasoning_tokens(self._service.runtime.tokenizer) or 0
        new: list[TokenLogprobs] = logprobs.all[max(self._given, skipped) :]
        self._given = len(logprobs.all)
        found = [{**one, "bytes": one["bytes"] or []} for one in self._service.texts.chat(new)]
        self._logprobs += found
        return found

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        """Return the part with the last item's text."""
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _tell_text(self, what: str, **values: Any) -> None:
        """Add an event of the last item's text."""
        kind = self._items[-1]["type"]
        if kind != "message":
            values.pop("logprobs", None)
        self._tell_item(f"response.{_FIELDS[kind]}.{what}", **values)

    def _tell_item(self, name: str, **values: Any) -> None:
        """Add an event of the last item."""
        item = self._items[-1]
        place = {} if item["type"] == "function_call" else {"content_index": 0}
        self._tell(name, item_id=item["id"], output_index=len(self._items) - 1, **place, **values)

    def _tell(self, name: str, **values: Any) -> None:
        self._events.append(Event({"type": name, "sequence_number": self._number, **values}, name))
        self._number += 1

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _response(self) -> Json:
        """Return the response as it is now, without figures."""
        asked, sampling, choice = self._asked, self._job.sampling, self._asked.tool_choice
        form = asked.text.format if asked.text else None
        is_cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._service.settings.model_name,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self._service.fingerprint,
            "temperature": sampling.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, Fields) else choice or "auto",
            "tools": [{**tool.model_dump(), "strict": bool(tool.strict)} for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }
