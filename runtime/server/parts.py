"""Splits the text of an answer, as it comes, into content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.runtime.server.content import ContentWriter
from redraft.runtime.server.text_reader import Reading, TextReader
from redraft.runtime.server.tool_calls import CallReader
from redraft.runtime.server.tool_formats import AnswerFormat, ToolFormat


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning section."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call begins. index: number of calls before it."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """Further text of a call's arguments, exactly as the model wrote it. All text of a call is one JSON object."""

    index: int
    text: str


Part = Content | Reasoning | ToolCall | ToolArguments


class AnswerParser:
    """The parts of one answer, in their order. They depend on the whole text only, not on how it is cut into pieces.

    Reasoning: newlines at both its ends, and between it and the content, belong to the template and are left out. Only
    an answer's beginning can open a section. One that does not end is reasoning to the end.

    Calls: a call begins as soon as its name is known and the arguments' `{` is read. Text before that which is no call
    is content, as it was written. A call that has begun stays. If its JSON turns out to be wrong, or the answer ends,
    its arguments end there: they are no JSON, and text from the first wrong character on is content. White space alone
    before and after calls is left out, and so is the newline that the format puts before a call.

    reasoning_end: characters of the answer up to the end of the reasoning section, markers included; 0 if it has none,
                   None as long as that is open.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        tools = answer_format.tools
        self._format = answer_format
        self._reader = TextReader()
        self._parts: list[Part] = []
        self._index = -1  # of the latest call
        self._content = ContentWriter(self._write_content, newline=tools is not None and tools.newline)
        self._calls = None if tools is None else CallReader(tools, self._reader, self._begin, self._write_arguments)
        self._reading = self._answer()
        self._characters = 0
        self.reasoning_end: int | None = None

    def push(self, text: str) -> list[Part]:
        """Add text. Returns new parts, which no later text can change."""
        self._reader.text += text
        self._characters += len(text)
        return self._resume()

    def finish(self) -> list[Part]:
        """Return the last parts. No more text can be added."""
        self._reader.ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        next(self._reading, None)
        if self._calls is not None:
            self._calls.write()
        parts, self._parts = self._parts, []
        return parts

    def _answer(self) -> Reading[None]:
        """Read the whole answer."""
        if self._format.reasoning is not None:
            yield from self._reasoning(*self._format.reasoning)
        else:
            self.reasoning_end = 0
        if self._format.tools is None or self._calls is None:
            while text := (yield from self._reader.before(None)):
                self._content.write(text)
        else:
            yield from self._content_and_calls(self._format.tools, self._calls)
        self._content.finish()

    def _content_and_calls(self, tools: ToolFormat, calls: CallReader) -> Reading[None]:
        """Read the answer after its reasoning section."""
        is_call, bare = False, tools is ToolFormat.LLAMA
        while True:
            while bare:
                is_call = bare = yield from self._call(calls.bare(after_call=is_call))
            while text := (yield from self._reader.before(tools.opener)):
                self._content.write(text)
            if not (yield from self._reader.starts(tools.opener)):
                return
            is_call = yield from self._call(calls.marked())
            bare = is_call and tools is ToolFormat.LLAMA

    def _reasoning(self, opener: str, closer: str) -> Reading[None]:
        """Read the reasoning section, if the answer begins with one."""
        reader = self._reader
        if not self._format.in_reasoning:
            yield from reader.skip()
            if not (yield from reader.starts(opener)):
                reader.place = self.reasoning_end = 0
                return
            yield from reader.expect(opener)
        newlines: str | None = None  # the last ones so far; None before other text
        while text := (yield from reader.before(closer)):
            if newlines is None:
                text = text.lstrip("\n")
            body = text.rstrip("\n")
            if body:
                self._parts.append(Reasoning((newlines or "") + body))
                newlines = ""
            if newlines is not None:
                newlines += text[len(body) :]
        if (yield from reader.starts(closer)):
            yield from reader.expect(closer)
            self.reasoning_end = self._characters - (len(reader.text) - reader.place)
        self._content.after_section()

    def _call(self, reading: Reading[str | None]) -> Reading[bool]:
        """Read a call. If it is none, write its text as content, and return false."""
        other = yield from reading
        if other is not None:
            self._content.write(other)
        return other is None

    def _begin(self, name: str) -> None:
        self._content.before_call()
        self._index += 1
        self._parts.append(ToolCall(self._index, name))

    def _write_arguments(self, text: str) -> None:
        self._parts.append(ToolArguments(self._index, text))

    def _write_content(self, text: str) -> None:
        self._parts.append(Content(text))
