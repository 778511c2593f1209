"""Renders answers of chats and completions: outputs of requests become their objects, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.parts import Content, Part, Reasoning, ToolArguments, ToolCall
from redraft.runtime.server.reading import ChatReader, ReadLogprobs
from redraft.runtime.server.rendering import Event, Json
from redraft.runtime.server.service import Service
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.server.tool_formats import AnswerFormat
from redraft.runtime.server.usage import speculation, usage
from redraft.runtime.submission import Submission, Written

DONE = "[DONE]"


class Choice(Protocol):
    """One choice of an answer. It is read as chunks, or whole, never both."""

    def begin(self) -> list[Json]:
        """Return the chunks before the first output."""

    def push(self, written: Written) -> list[Json]:
        """Return the chunks of an output; the last one has the reason of the end."""

    def whole(self) -> Json:
        """Return the choice, after its last output."""


class ChatChoice:
    """A choice of a chat: an assistant's message, with its reasoning and tool calls apart."""

    def __init__(self, index: int, request: Request, form: AnswerFormat, texts: TokenTexts) -> None:
        self._index = index
        self._reader = self._reading(index, request, form)
        self._parts: list[Part] = []
        self._texts = texts
        self._reason: str | None = None

    def _reading(self, index: int, request: Request, form: AnswerFormat) -> ChatReader:
        """Return the reader of the choice's outputs."""
        return ChatReader(index, request, form)

    def begin(self) -> list[Json]:
        """Return the chunk with the role."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def push(self, written: Written) -> list[Json]:
        """Return the chunks of an output."""
        parts, tokens, reason = self._reader.push(written)
        self._parts += parts
        chunks = [self._chunk(self._delta(parts), tokens)] if parts or tokens else []
        if reason is not None:
            self._reason = "tool_calls" if self._reader.called and reason == "stop" else reason
            chunks.append(self._chunk({}, reason=self._reason))
        return chunks

    def whole(self) -> Json:
        """Return the choice with its message."""
        delta, logprobs = self._delta(self._parts), self._reader.logprobs
        content = delta.pop("content", None if self._reader.called else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        calls = delta.pop("tool_calls", [])
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {
            "index": self._index,
            "message": {**message, **delta},
            "logprobs": self._as_logprobs(logprobs.all) if logprobs.given else None,
            "finish_reason": self._reason,
        }

    def _chunk(self, delta: Json, tokens: Sequence[TokenLogprobs] = (), reason: str | None = None) -> Json:
        logprobs = self._as_logprobs(tokens) if tokens else None
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _as_logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json:
        return {"content": self._texts.chat(tokens), "refusal": None}

    def _delta(self, parts: Sequence[Part]) -> Json:
        """Return parts as the fields of a message, with one entry for each tool call."""
        delta: Json = {}
        calls: dict[int, Json] = {}
        for part in parts:
            if isinstance(part, Content):
                delta["content"] = delta.get("content", "") + part.text
            elif isinstance(part, Reasoning):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
            elif isinstance(part, ToolCall):
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {"index": part.index, "id": self._reader.call_id(part.index), "type": "function",
                                     "function": function}  # fmt: skip
            else:
                assert isinstance(part, ToolArguments)
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta


class CompletionChoice:
    """A choice of a completion: a text.   echo: the text of the prompt, which comes first."""

    def __init__(self, index: int, request: Request, texts: TokenTexts, echo: str = "") -> None:
        self._index = index
        self._echo = echo
        self._text = [echo]
        self._logprobs = ReadLogprobs(request)
        self._texts = texts
        self._characters = 0
        self._reason: str | None = None

    def begin(self) -> list[Json]:
        """Return the chunk with the prompt, if it is wanted."""
        return [self._object(self._echo)] if self._echo else []

    def push(self, written: Written) -> list[Json]:
        """Return the chunk of an output, unless it has neither text nor an end."""
        self._text.append(written.text)
        self._reason = written.output.finish_reason
        tokens = self._logprobs.take(len(written.output.token_ids))
        logprobs = self._texts.completion(tokens, self._characters) if tokens else None
        self._characters += sum(len(self._texts.of(one.token_id).text) for one in tokens)
        if not (written.text or tokens or self._reason):
            return []
        return [self._object(written.text, logprobs)]

    def whole(self) -> Json:
        """Return the choice with its text."""
        logprobs = self._texts.completion(self._logprobs.all, 0) if self._logprobs.given else None
        return self._object("".join(self._text), logprobs)

    def _object(self, text: str, logprobs: Json | None = None) -> Json:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._reason}


@dataclass
class Choices:
    """An answer of choices, as chats and completions have them.

    choices: one for each submission.   per_prompt: choices of one prompt.   seed: of the first choice.
    kind, chunk_kind: value of `object` of the whole answer, and of a chunk.
    include_usage: True if a stream's last chunk has the usage, and the others null.
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
    include_usage: bool
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = len(self.choices)
        # Only those who ask for usage get the field, which is null before the last chunk.
        self._no_usage: Json = {"usage": None} if self.include_usage else {}

    def begin(self) -> list[Event]:
        """Return the first chunks of all choices."""
        return [self._event([chunk], self._no_usage) for choice in self.choices for chunk in choice.begin()]

    def push(self, number: int, written: Written) -> list[Event]:
        """Return the chunks of an output. The last one of all has the figures, unless the usage follows."""
        chunks = self.choices[number].push(written)
        self._left -= written.output.finish_reason is not None
        events = [self._event([chunk], self._no_usage) for chunk in chunks]
        if self._left == 0 and not self.include_usage:
            events[-1] = self._event(chunks[-1:], self._figures(False))
        return events

    def fail(self, error: ApiError) -> list[Event]:
        """Return the event of the error."""
        return [Event(error.body), Event(DONE)]

    def end(self) -> list[Event]:
        """Return the chunk with the usage, if it is wanted."""
        return [*([self._event([], self._figures(True))] if self.include_usage else []), Event(DONE)]

    def whole(self) -> Json:
        """Return the answer."""
        return {**self._envelope(self.kind, [choice.whole() for choice in self.choices]), **self._figures(True)}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.settings.model_name,
            "system_fingerprint": self.submissions[0].request.fingerprint or self.service.fingerprint,
            "choices": choices,
        }

    def _event(self, choices: list[Json], more: Json) -> Event:
        return Event({**self._envelope(self.chunk_kind, choices), **more})

    def _figures(self, with_usage: bool) -> Json:
        """Return the usage, and the figures of the speculation, after the last output."""
        requests = [submission.request for submission in self.submissions]
        counted = {"usage": usage(requests, self.per_prompt)} if with_usage else {}
        return {**counted, "redraft": speculation(requests, self.seed)}
