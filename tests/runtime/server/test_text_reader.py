"""JSON in text that grows: the reader accepts what Python's parser accepts, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redraft.runtime.server.text_reader import TextReader, Unexpected

PIECES = [
    "{", "}", "[", "]", ",", ":", '"', '"a"', '"a":', '"\\u00e9', "\\", '\\"', "\\x", "\x1f", "0", "1", "-", ".", "e",
    "+", "12", "0.5", "1E-2", "true", "false", "null", "nul", "NaN", " ", "\n", "é", "🙂", "\x7f", "\ufeff",
]  # fmt: skip


def read(text: str, cuts: Iterator[int]) -> bool:
    """Return true if the reader reads the whole text as one value, in pieces that end at these places."""
    reader = TextReader()

    def value() -> Iterator[None]:
        yield from reader.skip()
        yield from reader.json_value()
        yield from reader.skip()

    reading, last = value(), 0
    try:
        for cut in [*cuts, len(text)]:
            reader.text += text[last:cut]
            last = cut
            next(reading, None)
        reader.ended = True
        next(reading, None)
    except Unexpected:
        return False
    return reader.place == len(text)


def refuse(name: str) -> Any:
    raise ValueError(name)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.booleans())
@example('{"a": [1, {"b": -0.5e+3}, [], {}, "\\u00e9\\n"], "": null}', True)
@example("[1,]", False)
@example('{"a" 1}', True)
@example('"\\u00e"', True)
@example("[01]", False)
@example("-", True)
@example("[1.]", True)
@example("[1e+]", True)
def test_what_python_accepts_is_accepted(text: str, one_by_one: bool) -> None:
    assert read(text, iter(range(len(text)) if one_by_one else ())) == is_json(text)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_every_value_is_accepted(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read(text, iter(range(len(text))))


def test_a_value_may_be_nested_deeper_than_python_can_recurse() -> None:
    assert read("[" * 5000 + "]" * 5000, iter(()))


@pytest.mark.parametrize("text", ['"a"', '"\\ud83d\\ude42 \\\\ \\" \\n"', '"é🙂"'])
def test_strings_have_their_values(text: str) -> None:
    reader, found = TextReader(), []

    def string() -> Iterator[None]:
        found.append((yield from reader.json_string()))

    reading = string()
    for character in text:
        reader.text += character
        next(reading, None)
    assert found == [json.loads(text)]
