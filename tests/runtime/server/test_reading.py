"""Reads answers of chats: the tokens of their reasoning are counted, whatever tokens the markers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.requests.request import Request
from redraft.runtime.server.reading import ChatReader
from redraft.runtime.server.tool_formats import AnswerFormat
from redraft.runtime.submission import Written
from tests.runtime.fakes import VOCABULARY, byte_text

OPENER, CLOSER = VOCABULARY, VOCABULARY + 1
"""Tokens of the markers."""


@pytest.mark.parametrize(
    ("new", "text", "in_reasoning", "expected"),
    [
        ([OPENER, *"é".encode(), CLOSER, *b"\nyes"], "<think>é</think>\nyes", False, 4),
        ([*b"a", CLOSER, *"é".encode()], "a</think>é", True, 2),
        ([*b"a</think>b"], "a</think>b", True, 9),
        ([OPENER, *b"abc"], "<think>abc", False, None),
        ([*b"abc"], "abc", False, 0),
    ],
)
def test_reasoning_tokens_include_the_markers(
    new: list[int], text: str, in_reasoning: bool, expected: int | None
) -> None:
    tokenizer = byte_text()
    tokenizer.tokenizer.add_special_tokens(["<think>", "</think>"])
    sampler: Any = SimpleNamespace(logprobs=None)
    request = Request([97, 98, *new], 2, 200, frozenset(), sampler)
    reader = ChatReader(0, request, AnswerFormat(reasoning=("<think>", "</think>"), in_reasoning=in_reasoning))
    output = reader.push(Written(text, RequestOutput(request, tuple(new), None, "stop")))
    assert output.finish_reason == "stop"
    assert reader.reasoning_tokens(tokenizer) == expected
