"""An answer's parts: content, reasoning and tool calls, the same however many tokens a step accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redraft.runtime.server.parts import AnswerParser, Content, Part, Reasoning, ToolArguments, ToolCall
from redraft.runtime.server.tool_formats import AnswerFormat, ToolFormat

THINK = ("<think>", "</think>")
PLAIN = AnswerFormat()
THINKING = AnswerFormat(reasoning=THINK)
HERMES = AnswerFormat(ToolFormat.HERMES)
LLAMA = AnswerFormat(ToolFormat.LLAMA)
MISTRAL = AnswerFormat(ToolFormat.MISTRAL)
ALL = AnswerFormat(ToolFormat.HERMES, THINK)


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [ToolCall(index, name), ToolArguments(index, arguments)]


CASES: dict[str, tuple[AnswerFormat, str, list[Part]]] = {
    "text alone": (ALL, "\n Hé 🙂 </think> <tool_cal\n", [Content("\n Hé 🙂 </think> <tool_cal\n")]),
    "no format": (PLAIN, "<think>a</think><tool_call>", [Content("<think>a</think><tool_call>")]),
    "white space alone": (ALL, " \n", [Content(" \n")]),
    "nothing": (ALL, "", []),
    "reasoning": (THINKING, "<think>\nwell\n\nso\n</think>\n\nHi\n", [Reasoning("well\n\nso"), Content("Hi\n")]),
    "reasoning that the prompt opens": (
        replace(THINKING, in_reasoning=True), "a <think> b\n</think>\n\n  Hi",
        [Reasoning("a <think> b"), Content("  Hi")],
    ),
    "empty reasoning": (THINKING, "<think>\n\n</think>\n\nHi", [Content("Hi")]),
    "reasoning that does not end": (THINKING, "\n<think>\nwell </thin\n", [Reasoning("well </thin")]),
    "a tag inside of the content": (THINKING, "Write <think>.</think>", [Content("Write <think>.</think>")]),
    "Mistral's reasoning": (
        AnswerFormat(ToolFormat.MISTRAL, ("[THINK]", "[/THINK]")), "[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{}",
        [Reasoning("a"), Content("b"), *call(0, "f", "{}")],
    ),
    "calls inside of reasoning are reasoning": (
        ALL, "<think><tool_call>{}</tool_call></think>\n", [Reasoning("<tool_call>{}</tool_call>")]
    ),
    "Hermes": (
        ALL, '<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        call(0, "f", '{"a": [1, {"b": "}"}]}'),
    ),
    "two calls, and text around them": (
        HERMES,
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"arguments" : {"x":1} '
        ', "n": null, "name":"g"}\n</tool_call>\nDone.\n',
        [Content("Let me see.\n"), *call(0, "f", "{}"), *call(1, "g", '{"x":1}'), Content("Done.\n")],
    ),
    "markers inside of strings": (
        HERMES, '<tool_call>{"name": "f", "arguments": {"</tool_call>": "<tool_call>\\"}"}}</tool_call>',
        call(0, "f", '{"</tool_call>": "<tool_call>\\"}"}'),
    ),
    "a name with escapes": (
        HERMES, '<tool_call>{"name": "f\\u00e9", "arguments": {}}</tool_call>', call(0, "fé", "{}")
    ),
    "a call that the end cuts": (
        HERMES, 'a\n<tool_call>\n{"name": "f", "arguments": {"x": "y', [Content("a"), *call(0, "f", '{"x": "y')]
    ),
    "a call without its closing marker": (
        HERMES, '<tool_call>{"name": "f", "arguments": {}}\n</tool_', call(0, "f", "{}")
    ),
    "a call that the end cuts before its arguments": (
        HERMES, 'a\n<tool_call>\n{"name": "f', [Content('a\n<tool_call>\n{"name": "f')]
    ),
    "wrong JSON, then a call": (
        HERMES, 'a\n<tool_call>{name: 1}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [Content("a\n<tool_call>{name: 1}</tool_call>"), *call(0, "f", "{}")],
    ),
    "wrong JSON in arguments": (
        HERMES, '<tool_call>{"name": "f", "arguments": {"a": "say "hi""}}</tool_call>',
        [*call(0, "f", '{"a": "say "'), Content('hi""}}</tool_call>')],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', [Content('<tool_call>{"name": "f"}</tool_call>')]),
    "arguments that are no object": (
        HERMES, '<tool_call>{"name": "f", "arguments": "{}"}', [Content('<tool_call>{"name": "f", "arguments": "{}"}')]
    ),
    "two names": (
        HERMES, '<tool_call>{"name": "f", "name": "g", "arguments": {}}',
        [Content('<tool_call>{"name": "f", "name": "g", "arguments": {}}')],
    ),
    "white space around a call": (
        HERMES, ' \n <tool_call>{"name": "f", "arguments": {}}</tool_call>\n\n  Hi',
        [*call(0, "f", "{}"), Content("  Hi")],
    ),
    "an empty name": (
        HERMES, '<tool_call>{"name": "", "arguments": {}}', [Content('<tool_call>{"name": "", "arguments": {}}')]
    ),
    "a name that is no text": (
        HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [Content('<tool_call>{"name": "\\ud800", "arguments": {}}')],
    ),
    "Llama": (LLAMA, ' {"name": "f", "parameters": {"a": 1}}\n', call(0, "f", '{"a": 1}')),
    "Llama with a tag": (
        LLAMA, 'Hm <|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        [Content("Hm "), *call(0, "f", "{}")],
    ),
    "Llama, two calls": (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": 2}}\n'
        '<|python_tag|>{"name":"h","parameters":{}};{"name":"i","parameters":{}}',
        [*call(0, "f", "{}"), *call(1, "g", '{"b": 2}'), *call(2, "h", "{}"), *call(3, "i", "{}")],
    ),
    "Llama's built-in tools": (LLAMA, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    "Llama, other JSON": (LLAMA, ' {"nome": 1} {}', [Content(' {"nome": 1} {}')]),
    "Llama, JSON inside of a text": (
        LLAMA, 'Do {"name": "f", "parameters": {}}', [Content('Do {"name": "f", "parameters": {}}')]
    ),
    "Llama, text after a call": (
        LLAMA, '{"name": "f", "parameters": {}}; and', [*call(0, "f", "{}"), Content("; and")]
    ),
    "Mistral": (
        MISTRAL,
        'Hm\n[TOOL_CALLS] [{"name": "f", "arguments": {"[TOOL_CALLS]": "]"}, "id": "a1"}, {"arguments":{},"name":"g"}]',
        [Content("Hm\n"), *call(0, "f", '{"[TOOL_CALLS]": "]"}'), *call(1, "g", "{}")],
    ),
    "Mistral, the newer form": (
        MISTRAL, 'Hm[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g-2[CALL_ID]a1[ARGS] {}[TOOL_CALLS]h{"c":3}',
        [Content("Hm"), *call(0, "f", '{"a": 1}'), *call(1, "g-2", "{}"), *call(2, "h", '{"c":3}')],
    ),
    "Mistral, a second call that is wrong": (
        MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 1}]',
        [*call(0, "f", "{}"), Content(', {"name": 1}]')],
    ),
    "Mistral, no call": (
        MISTRAL, "[TOOL_CALLS][] [TOOL_CALLS]f[ARGS]x[TOOL_CALLS]",
        [Content("[TOOL_CALLS][] [TOOL_CALLS]f[ARGS]x[TOOL_CALLS]")],
    ),
}  # fmt: skip


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with neighbours of the same kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCall) or type(last) is not type(part):
            found.append(part)
        else:
            found[-1] = replace(last, text=last.text + part.text)  # type: ignore[union-attr, type-var, misc]
    return found


def parsed(answer_format: AnswerFormat, text: str, cuts: Iterable[int] = ()) -> list[Part]:
    """Return the joined parts of a text that comes in pieces, which end at these places."""
    parser, parts, last = AnswerParser(answer_format), [], 0
    for cut in [*sorted(cuts), len(text)]:
        parts += parser.push(text[last:cut])
        last = cut
    parts += parser.finish()
    assert not any(part.text == "" for part in parts if not isinstance(part, ToolCall)), parts
    return joined(parts)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_same_wherever_the_text_is_cut(name: str) -> None:
    answer_format, text, expected = CASES[name]
    assert parsed(answer_format, text) == expected
    assert parsed(answer_format, text, range(len(text))) == expected
    for cut in range(len(text)):
        assert parsed(answer_format, text, [cut]) == expected
        assert parsed(answer_format, text, [cut, cut + 1]) == expected


@pytest.mark.parametrize(
    ("answer_format", "text", "end"),
    [
        (PLAIN, "<think>a</think>", 0), (THINKING, " a", 0), (THINKING, "", 0),
        (THINKING, " <think>a\n</think>\nb", 18), (THINKING, "<think>a", None),
        (replace(THINKING, in_reasoning=True), "a</think></think>", 9),
    ],
)  # fmt: skip
def test_the_end_of_the_reasoning_is_the_same_wherever_the_text_is_cut(
    answer_format: AnswerFormat, text: str, end: int | None
) -> None:
    for cut in range(len(text) + 1):
        parser = AnswerParser(answer_format)
        parser.push(text[:cut])
        parser.push(text[cut:])
        parser.finish()
        assert parser.reasoning_end == end


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    '{"name": "f", "arguments": {"a": "', '{"name": "f", "parameters": ', '{"arguments": {}, "name": ', '"g"', "{}",
    "{", "}", "[", "]", ",", "; ", '"', "\\", "\n", "\n\n", " ", "text", "f", "é🙂", "1", "<", "</", "<tool", "[TOOL",
    "_CALLS]",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '[{"name": "f", "arguments": {}}',
]  # fmt: skip
FORMATS = st.builds(
    AnswerFormat, st.sampled_from([None, *ToolFormat]), st.sampled_from([None, THINK]), st.just(False)
) | st.builds(AnswerFormat, st.sampled_from([None, *ToolFormat]), st.just(THINK), st.just(True))


@settings(max_examples=400, deadline=None)
@given(FORMATS, st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=2), max_size=12).map("".join), st.data())
def test_parts_are_the_same_for_every_text(answer_format: AnswerFormat, text: str, data: st.DataObject) -> None:
    expected = parsed(answer_format, text)
    assert parsed(answer_format, text, range(len(text))) == expected
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    assert parsed(answer_format, text, cuts) == expected
    calls = [part.index for part in expected if isinstance(part, ToolCall)]
    assert calls == list(range(len(calls)))


WRITTEN: dict[ToolFormat, str] = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": |}\n</tool_call>',
    ToolFormat.LLAMA: '{"name": "f", "parameters": |}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": |}]',
}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*ToolFormat]),
    st.dictionaries(
        st.text() | st.sampled_from(FRAGMENTS),
        st.recursive(st.text() | st.integers() | st.none() | st.sampled_from(FRAGMENTS), st.lists, max_leaves=4),
        max_size=3,
    ),
    st.sampled_from([None, 2]),
    st.booleans(),
)
@example(ToolFormat.MISTRAL, {"a": "]}"}, None, False)
def test_arguments_come_at_once_and_exactly_as_they_are_written(
    tools: ToolFormat, arguments: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    before, after = WRITTEN[tools].split("|")
    parser = AnswerParser(AnswerFormat(tools))
    assert parser.push(before) == []
    assert parser.push(written[0]) == call(0, "f", "{")
    for character in written[1:]:
        assert parser.push(character) == [ToolArguments(0, character)]
    assert parser.push(after) + parser.finish() == []


def test_content_comes_as_soon_as_no_marker_is_possible() -> None:
    parser = AnswerParser(HERMES)
    given = ["a\n", "b", " <tool", "s", "\n", "<", "tool_call>{", '"', "x"]
    taken = ["".join(part.text for part in parser.push(text)) for text in given]  # type: ignore[union-attr]
    assert taken == ["a", "\nb", " ", "<tools", "", "", "", "", ""]
    assert parser.finish() == [Content('\n<tool_call>{"x')]
