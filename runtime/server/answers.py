"""The choices of an answer: outputs of requests become the objects of chats and completions, whole or in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.server.parts import AnswerParser, Content, Part, Reasoning, ToolArguments, ToolCall
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.server.tool_formats import AnswerFormat
from redraft.runtime.submission import Written

Json = dict[str, Any]


class Choice(Protocol):
    """One choice of an answer. It is read as chunks, or whole, never both."""

    def begin(self) -> list[Json]:
        """Return the chunks before the first output."""

    def push(self, written: Written) -> list[Json]:
        """Return the chunks of an output; the last one has the reason of the end."""

    def whole(self) -> Json:
        """Return the choice, after its last output."""


class ReadLogprobs:
    """The log probabilities of a request's tokens, as they come. `given` is false if it asked for none."""

    def __init__(self, request: Request) -> None:
        self._sampler = request.sampler
        self.given = request.sampler.logprobs is not None
        self.all: list[TokenLogprobs] = []

    def take(self, tokens: int) -> list[TokenLogprobs]:
        """Return those of the next tokens."""
        known = self._sampler.logprobs or []
        found = list(known[len(self.all) : len(self.all) + tokens])
        self.all += found
        return found


class ChatChoice:
    """A choice of a chat: an assistant's message, with its reasoning and tool calls apart."""

    def __init__(self, index: int, request: Request, form: AnswerFormat, texts: TokenTexts) -> None:
        self._index = index
        self._parser = AnswerParser(form)
        self._parts: list[Part] = []
        self._logprobs = ReadLogprobs(request)
        self._texts = texts
        self._reason: str | None = None
        self._calls = False
        prompt = ",".join(map(str, request.tokens[: request.prompt_length]))
        self._key = hashlib.sha256(f"{index} {prompt}".encode()).hexdigest()

    def begin(self) -> list[Json]:
        """Return the chunk with the role."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def push(self, written: Written) -> list[Json]:
        """Return the chunks of an output."""
        reason = written.output.finish_reason
        parts = self._parser.push(written.text)
        if reason is not None:
            parts = [*parts, *self._parser.finish()]
        self._calls = self._calls or any(isinstance(part, ToolCall) for part in parts)
        self._parts += parts
        tokens = self._logprobs.take(len(written.output.token_ids))
        chunks = [self._chunk(self._delta(parts), tokens)] if parts or tokens else []
        if reason is not None:
            self._reason = "tool_calls" if self._calls and reason == "stop" else reason
            chunks.append(self._chunk({}, reason=self._reason))
        return chunks

    def whole(self) -> Json:
        """Return the choice with its message."""
        delta = self._delta(self._parts)
        message = {"role": "assistant", "content": delta.pop("content", None if self._calls else ""), "refusal": None}
        calls = delta.pop("tool_calls", [])
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {
            "index": self._index,
            "message": {**message, **delta},
            "logprobs": self._as_logprobs(self._logprobs.all) if self._logprobs.given else None,
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
                calls[part.index] = {"index": part.index, "id": self._call_id(part.index), "type": "function",
                                     "function": function}  # fmt: skip
            else:
                assert isinstance(part, ToolArguments)
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def _call_id(self, call: int) -> str:
        """Return a call's id: nine letters and digits, as Mistral's templates want. Equal requests give equal ids."""
        return hashlib.sha256(f"{self._key} {call}".encode()).hexdigest()[:9]


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
