"""Reads the outputs of a request: the parts of a chat's answer, and the log probabilities of its tokens."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import NamedTuple

from redraft.runtime.requests.request import FinishReason, Request
from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.server.parts import AnswerParser, Part, ToolCall
from redraft.runtime.server.tool_formats import AnswerFormat
from redraft.runtime.submission import Written
from redraft.runtime.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""Tokens before an answer with which it is decoded: decoders treat the start of a text differently."""


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


class ChatOutput(NamedTuple):
    """One output of a chat: its parts, the log probabilities of its tokens, and the reason of the end, if it is one."""

    parts: list[Part]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None


class ChatReader:
    """Reads a choice of a chat.

    logprobs: those of all tokens so far.   called: True if the model has called a tool.
    """

    def __init__(self, index: int, request: Request, form: AnswerFormat) -> None:
        """index: of the choice in the answer."""
        self.request = request
        self.logprobs = ReadLogprobs(request)
        self.called = False
        self._form = form
        self._reasoning: int | None = None
        self._parser = AnswerParser(form)
        prompt = ",".join(map(str, request.tokens[: request.prompt_length]))
        self._key = hashlib.sha256(f"{index} {prompt}".encode()).hexdigest()

    def push(self, written: Written) -> ChatOutput:
        """Read an output."""
        parts, output = self._read(written), written.output
        self.called = self.called or any(isinstance(part, ToolCall) for part in parts)
        return ChatOutput(parts, self.logprobs.take(len(output.token_ids)), output.finish_reason)

    def _read(self, written: Written) -> list[Part]:
        """Return the parts of an output; those of the last one end the answer."""
        parts = self._parser.push(written.text)
        return parts if written.output.finish_reason is None else [*parts, *self._parser.finish()]

    def call_id(self, call: int) -> str:
        """Return a call's id: nine letters and digits, as Mistral's templates want. Equal requests give equal ids."""
        return self.item_id(str(call))[:9]

    def item_id(self, item: str) -> str:
        """Return an id of 64 letters and digits for a named part of the answer. Equal requests give equal ids."""
        return hashlib.sha256(f"{self._key} {item}".encode()).hexdigest()

    def reasoning_tokens(self, tokenizer: Tokenizer) -> int | None:
        """Return the tokens of the reasoning section, markers included; None as long as that is open."""
        end = self._parser.reasoning_end
        if self._reasoning is None and end is not None:
            self._reasoning = self._tokens(tokenizer, end)
        return self._reasoning

    def _tokens(self, tokenizer: Tokenizer, end: int) -> int:
        """Return the tokens of the answer's first `end` characters."""
        request, keep = self.request, frozenset(self._form.kept_tokens(tokenizer))
        context = request.tokens[: request.prompt_length][-_CONTEXT_TOKENS:]
        new, before = request.new_tokens, len(tokenizer.decode(context, keep))

        def characters(tokens: int) -> int:
            return len(tokenizer.decode(context + new[:tokens], keep)) - before

        return bisect_left(range(len(new)), end, key=characters)
