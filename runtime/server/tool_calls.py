"""Reads tool calls while they come: their names, and their arguments piece by piece."""

from __future__ import annotations

from collections.abc import Callable

from redraft.runtime.server.text_reader import SPACE, Reading, TextReader, Unexpected
from redraft.runtime.server.tool_formats import ToolFormat

NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
"""Characters of names and ids that no quotation marks enclose."""
_BETWEEN_CALLS = SPACE | {";"}


class CallReader:
    """Reads the calls of one format.

    A call begins as soon as its name is known and the `{` of its arguments is read. Then it stays a call.
    """

    def __init__(
        self, tools: ToolFormat, reader: TextReader, begin: Callable[[str], None], write: Callable[[str], None]
    ) -> None:
        """begin: takes the name of a call that begins.   write: takes further text of its arguments."""
        self._tools = tools
        self._reader = reader
        self._begin_call = begin
        self._write = write
        self._other: int | None = None  # place of the first character that belongs to no call, unless one begins
        self._arguments: int | None = None  # place of the first character of arguments that is not written

    def marked(self) -> Reading[str | None]:
        """Read the call that begins with the format's opener, or Mistral's list of calls.

        Return None, or the text that turned out to belong to no call. It ends before the first wrong character.
        """
        return self._read(self._marked_call())

    def bare(self, after_call: bool) -> Reading[str | None]:
        """Read a call without an opener, and what may be before it, and return as `marked` does."""
        return self._read(self._bare_call(_BETWEEN_CALLS if after_call else SPACE))

    def write(self) -> None:
        """Write the arguments that have come."""
        self._write_arguments(self._reader.place)

    def _read(self, reading: Reading[None]) -> Reading[str | None]:
        self._other = self._reader.place
        try:
            yield from reading
        except Unexpected:
            self._end_arguments(self._reader.place)
            return "" if self._other is None else self._reader.text[self._other : self._reader.place]
        return None

    def _bare_call(self, between: frozenset[str]) -> Reading[None]:
        yield from self._reader.skip(between)
        yield from self._call_object()

    def _marked_call(self) -> Reading[None]:
        reader, tools = self._reader, self._tools
        yield from reader.expect(tools.opener)
        yield from reader.skip()
        if tools is not ToolFormat.MISTRAL:
            yield from self._call_object()
            if tools is ToolFormat.HERMES:
                yield from reader.skip()
                yield from reader.expect("</tool_call>")
        elif (yield from reader.peek()) == "[":
            yield from self._call_list()
        else:
            yield from self._named_call()

    def _call_list(self) -> Reading[None]:
        reader, separator = self._reader, "["
        while separator != "]":
            yield from reader.expect(separator)
            yield from reader.skip()
            yield from self._call_object()
            self._other = reader.place
            yield from reader.skip()
            separator = "," if (yield from reader.peek()) == "," else "]"
        yield from reader.expect(separator)

    def _named_call(self) -> Reading[None]:
        """Read the name, perhaps an id, and the arguments."""
        reader, start = self._reader, self._reader.place
        yield from reader.skip(NAME_CHARACTERS)
        name = reader.text[start : reader.place]
        if (yield from reader.starts("[CALL_ID]")):
            yield from reader.expect("[CALL_ID]")
            yield from reader.skip(NAME_CHARACTERS)
        if (yield from reader.starts("[ARGS]")):
            yield from reader.expect("[ARGS]")
        yield from reader.skip()
        yield from self._read_arguments(name)
        self._end_arguments(reader.place)

    def _call_object(self) -> Reading[None]:
        """Read a JSON object with a name and arguments, in any order, and perhaps more."""
        reader = self._reader
        name: str | None = None
        arguments: tuple[int, int] | None = None  # places of the first character and after the last one
        separator = "{"
        while separator != "}":
            yield from reader.expect(separator)
            yield from reader.skip()
            key = yield from reader.json_key()
            if key == "name" and name is None:
                name = yield from reader.json_string()
                if arguments is not None:
                    self._begin(name, arguments[0])
                    self._end_arguments(arguments[1])
            elif key in self._tools.keys and arguments is None:
                start = reader.place
                yield from self._read_arguments(name)
                self._end_arguments(reader.place)
                arguments = start, reader.place
            elif key == "name" or key in self._tools.keys:
                raise Unexpected
            else:
                yield from reader.json_value()
            yield from reader.skip()
            separator = "," if (yield from reader.peek()) == "," else "}"
        if name is None or arguments is None:
            raise Unexpected
        yield from reader.expect(separator)

    def _read_arguments(self, name: str | None) -> Reading[None]:
        """Read a JSON object. It begins the call if the name is known."""
        if (yield from self._reader.peek()) != "{":
            raise Unexpected
        if name is not None:
            self._begin(name, self._reader.place)
        yield from self._reader.json_value()

    def _begin(self, name: str, arguments: int) -> None:
        """Begin a call. arguments: place of their first character. Raises Unexpected for an impossible name."""
        if not name or any("\ud800" <= character <= "\udfff" for character in name):
            raise Unexpected
        self._begin_call(name)
        self._other, self._arguments = None, arguments

    def _write_arguments(self, end: int) -> None:
        """Write the arguments of the open call to the place `end`."""
        if self._arguments is not None:
            if end > self._arguments:
                self._write(self._reader.text[self._arguments : end])
            self._arguments = end

    def _end_arguments(self, end: int) -> None:
        self._write_arguments(end)
        self._arguments = None
