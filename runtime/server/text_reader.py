"""Text that arrives in pieces, and JSON in it. Methods that may need more text are generators.

They read what the grammar allows, and stop at the first character that it does not allow. So what they read depends on
the whole text only, and not on the pieces. JSON is that of RFC 8259.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import TypeVar

_Found = TypeVar("_Found")
Reading = Generator[None, None, _Found]
"""A method of a reader: it yields when it needs more text, and returns what it found."""

END = ""
"""What `peek` returns at the end of the text."""
SPACE = frozenset(" \t\n\r")
_DIGITS, _HEXADECIMAL = frozenset("0123456789"), frozenset("0123456789abcdefABCDEF")
_ESCAPED, _SIGNS, _EXPONENT = frozenset('"\\/bfnrt'), frozenset("+-"), frozenset("eE")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORDS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class Unexpected(Exception):
    """The next character is not allowed here, or the text ends here."""


class TextReader:
    """The text so far, from some place on.

    text: that part of it.   place: of the next character in it.   ended: True if no more text comes.
    Only `before` drops text that it has passed, so places are valid until its next call.
    """

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.ended = False

    def peek(self) -> Reading[str]:
        """Return the next character, or END."""
        while self.place == len(self.text):
            if self.ended:
                return END
            yield
        return self.text[self.place]

    def skip(self, characters: frozenset[str] = SPACE) -> Reading[None]:
        """Read all of these characters that come next; by default JSON's white space."""
        while (yield from self.peek()) in characters:
            self.place += 1

    def starts(self, word: str) -> Reading[bool]:
        """Return true if the text goes on with `word`, which stays unread."""
        while True:
            found = self.text[self.place : self.place + len(word)]
            if found == word:
                return True
            if self.ended or not word.startswith(found):
                return False
            yield

    def expect(self, word: str) -> Reading[None]:
        """Read `word`. Raises Unexpected at the first character that differs."""
        for character in word:
            if (yield from self.peek()) != character:
                raise Unexpected
            self.place += 1

    def before(self, word: str | None) -> Reading[str]:
        """Read text that comes before `word`, as much as is certain; return "" at `word` and at the end.

        Without a word, read all text that has come.
        """
        while True:
            self.text, self.place = self.text[self.place :], 0
            found = -1 if word is None else self.text.find(word)
            end = found if found >= 0 else len(self.text)
            if found < 0 and word is not None and not self.ended:
                end -= _begun(self.text, word)
            if end or found >= 0 or self.ended:
                self.place = end
                return self.text[:end]
            yield

    def json_string(self) -> Reading[str]:
        """Read a string, and return its value."""
        start = self.place
        yield from self.expect('"')
        while True:
            plain = _PLAIN.match(self.text, self.place)
            assert plain is not None
            self.place = plain.end()
            character = yield from self.peek()
            if character == '"':
                self.place += 1
                return str(json.loads(self.text[start : self.place]))
            if character == "\\":
                self.place += 1
                yield from self._escape()
            elif character < " ":  # END, or a control character
                raise Unexpected

    def json_value(self) -> Reading[None]:
        """Read a value. A number ends before the first character that cannot belong to it."""
        closers: list[str] = []  # of the containers that are open
        while True:
            opened = yield from self._scalar_or_opener()
            if opened is not None:
                closers.append(_CLOSERS[opened])
                yield from self.skip()
                if (yield from self.peek()) != closers[-1]:
                    yield from self._key(closers)
                    continue
            while closers:
                yield from self.skip()
                character = yield from self.peek()
                if character not in (",", closers[-1]):
                    raise Unexpected
                self.place += 1
                if character == ",":
                    yield from self.skip()
                    yield from self._key(closers)
                    break
                closers.pop()
            if not closers:
                return

    def json_key(self) -> Reading[str]:
        """Read the name of a member with its colon and the space around that, and return the name."""
        name = yield from self.json_string()
        yield from self.skip()
        yield from self.expect(":")
        yield from self.skip()
        return name

    def _key(self, closers: list[str]) -> Reading[None]:
        """Read the name of a member if an object is open."""
        if closers[-1] == "}":
            yield from self.json_key()

    def _scalar_or_opener(self) -> Reading[str | None]:
        """Read a string, number or word and return None, or read and return a bracket that opens a container."""
        character = yield from self.peek()
        if character in _CLOSERS:
            self.place += 1
            return character
        if character == '"':
            yield from self.json_string()
        elif character in _WORDS:
            yield from self.expect(_WORDS[character])
        else:
            yield from self._number()
        return None

    def _number(self) -> Reading[None]:
        if (yield from self.peek()) == "-":
            self.place += 1
        if (yield from self.peek()) == "0":
            self.place += 1
        else:
            yield from self._digits()
        if (yield from self.peek()) == ".":
            self.place += 1
            yield from self._digits()
        if (yield from self.peek()) in _EXPONENT:
            self.place += 1
            if (yield from self.peek()) in _SIGNS:
                self.place += 1
            yield from self._digits()

    def _digits(self) -> Reading[None]:
        """Read one or more digits."""
        yield from self._one_of(_DIGITS)
        yield from self.skip(_DIGITS)

    def _escape(self) -> Reading[None]:
        """Read what follows a backslash."""
        if (yield from self.peek()) != "u":
            yield from self._one_of(_ESCAPED)
            return
        self.place += 1
        for _ in range(4):
            yield from self._one_of(_HEXADECIMAL)

    def _one_of(self, characters: frozenset[str]) -> Reading[None]:
        if (yield from self.peek()) not in characters:
            raise Unexpected
        self.place += 1


def _begun(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that begins `word`."""
    return next(length for length in range(len(word) - 1, -1, -1) if text.endswith(word[:length]))
