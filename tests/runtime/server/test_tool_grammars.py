"""Grammars of tool calls: every text that they allow is read back as the calls that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from redraft.runtime.params import LARK, Grammar
from redraft.runtime.sampling.constraints import Constraint, guided_tokenizer
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.fields import FunctionDefinition
from redraft.runtime.server.parts import AnswerParser, Content, Part, Reasoning, ToolArguments, ToolCall
from redraft.runtime.server.tool_choice import CallRules
from redraft.runtime.server.tool_formats import AnswerFormat, ToolFormat
from redraft.runtime.server.tool_grammars import call_grammar
from redraft.runtime.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, byte_text

MARKERS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
FORMS = {
    "hermes": AnswerFormat(ToolFormat.HERMES),
    "llama": AnswerFormat(ToolFormat.LLAMA),
    "mistral": AnswerFormat(ToolFormat.MISTRAL),
    "names": AnswerFormat(ToolFormat.MISTRAL, names_first=True),
}
ONE, TWO = ("add", '{"x": 1, "y": 3}'), ("now", "{}")
FUNCTIONS = (
    FunctionDefinition(
        name="add",
        parameters={
            "type": "object", "required": ["x", "y"], "additionalProperties": False,
            "properties": {"x": {"$ref": "#/$defs/digit"}, "y": {"$ref": "#/$defs/digit"}},
            "$defs": {"digit": {"enum": [1, 2, 3]}},
        },
    ),
    FunctionDefinition(
        name="addto",
        parameters={
            "required": ["to"], "additionalProperties": False,
            "properties": {"to": {"enum": ["é", "<tool_call>", '"}]']}},
        },
    ),
    FunctionDefinition(name="now"),
)  # fmt: skip
FREE, FORCED = CallRules(FUNCTIONS, forced=False, single=False), CallRules(FUNCTIONS, forced=True, single=False)
SINGLE = replace(FREE, single=True)


def tokenizer_with(markers: Sequence[AddedToken]) -> Tokenizer:
    """Return a tokenizer of bytes, and of these tokens."""
    tokenizer = byte_text()
    tokenizer.tokenizer.add_tokens(list(markers))
    return tokenizer


TOKENIZERS = {
    "text": tokenizer_with([]),
    "added": tokenizer_with([AddedToken(marker, special=False) for marker in MARKERS]),  # those of Qwen
    "special": tokenizer_with([AddedToken(marker, special=True) for marker in MARKERS]),
}
GUIDED = {
    kind: guided_tokenizer(one.tokenizer, one.tokenizer.get_vocab_size(), [EOS]) for kind, one in TOKENIZERS.items()
}


@lru_cache
def compiled(grammar: str, kind: str) -> Constraint:
    return Constraint(Grammar(LARK, grammar), GUIDED[kind])


def written(name: str, *calls: tuple[str, str]) -> str:
    """Return calls as a template writes them."""
    if name == "names":
        return "".join(f"[TOOL_CALLS]{one}[ARGS]{text}" for one, text in calls)
    key = "parameters" if name == "llama" else "arguments"
    objects = [f'{{"name": "{one}", "{key}": {text}}}' for one, text in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    return f"<|python_tag|>{'; '.join(objects)}" if name == "llama" else f"[TOOL_CALLS] [{', '.join(objects)}]"


def answer_of(form: AnswerFormat, rules: CallRules, wanted: str, kind: str, seed: int = 0) -> str:
    """Return the answer of a model that writes a text as long as it may, then draws tokens until it may end."""
    tokenizer, rng = TOKENIZERS[kind], np.random.default_rng(seed)
    constraint = compiled(call_grammar(rules, form, tokenizer), kind)
    vocabulary = tokenizer.tokenizer.get_vocab_size()
    wishes = [*(tokenizer.encode(wanted, special_tokens=False) if wanted else []), EOS]
    state, tokens = constraint.begin(()), list[int]()
    for _ in range(600):
        allowed = np.isfinite(constraint.process(state, np.zeros(vocabulary, np.float32)))
        if allowed[wishes[0]]:
            token, wishes = wishes[0], wishes[1:]
        else:
            choices = np.flatnonzero(allowed)
            token = int(rng.choice(choices[choices > ord(" ")] if (choices > ord(" ")).any() else choices))
            wishes = [EOS]
        if token == EOS:
            return tokenizer.decode(tokens, frozenset(tokenizer.special_ids(MARKERS)))
        tokens.append(token)
        state = constraint.advance(state, token)
    raise AssertionError("the answer does not end")


def parts_of(form: AnswerFormat, text: str) -> list[Part]:
    parser = AnswerParser(form)
    return parser.push(text) + parser.finish()


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    """Return the names and arguments of calls, which must match the schemas."""
    names = [part.name for part in parts if isinstance(part, ToolCall)]
    texts = [""] * len(names)
    for part in parts:
        if isinstance(part, ToolArguments):
            texts[part.index] += part.text
    found = [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]
    for name, arguments in found:
        if name == "add":
            assert list(arguments) == ["x", "y"]
            assert set(arguments.values()) <= {1, 2, 3}
        else:
            assert (name, arguments) in [("now", {}), *[("addto", {"to": to}) for to in ("é", "<tool_call>", '"}]')]]
    return found


every_form = pytest.mark.parametrize("name", FORMS)
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


@every_form
@every_tokenizer
def test_a_forced_answer_is_calls_alone(name: str, kind: str) -> None:
    for seed in range(5):
        for rules in (FORCED, replace(FORCED, single=True)):
            parts = parts_of(FORMS[name], answer_of(FORMS[name], rules, "Hello!", kind, seed))
            assert {type(part) for part in parts} == {ToolCall, ToolArguments}
            assert len(calls_of(parts)) == 1 or not rules.single


@every_form
@every_tokenizer
def test_calls_of_the_templates_form_stay_as_they_are(name: str, kind: str) -> None:
    one, two = written(name, ONE), written(name, ONE, TWO)
    for text, count in ((f"I add. é {one}", 1), (one, 1), (two, 2), ("Well?\n", 0), ("", 0)):
        assert answer_of(FORMS[name], FREE, text, kind) == text
        assert len(calls_of(parts_of(FORMS[name], text))) == count
    assert answer_of(FORMS[name], SINGLE, two, kind) == one
    two = two.removeprefix("<|python_tag|>")
    assert answer_of(FORMS[name], FORCED, two, kind) == two


@every_form
@every_tokenizer
def test_a_call_that_breaks_the_rules_becomes_one_that_does_not(name: str, kind: str) -> None:
    for call in (("add", '{"x": 7}'), ("minus", "{}"), ("add", '{"y": 1}'), ("addto", "{}"), ("now", '{"z": 1}')):
        parts = parts_of(FORMS[name], answer_of(FORMS[name], FREE, f"Well: {written(name, call)}", kind))
        assert parts[0] == Content("Well: ")
        assert len(calls_of(parts)) == 1


@every_form
@every_tokenizer
@pytest.mark.parametrize("given", [False, True], ids=["own opener", "in the prompt"])
def test_reasoning_comes_first_and_has_no_calls(name: str, kind: str, given: bool) -> None:
    form = replace(FORMS[name], reasoning=("<think>", "</think>"), in_reasoning=given)
    call, begin = written(name, ONE), "" if given else "\n<think>"
    thought = "Is <tool_call> or {...} of use?" if kind == "text" else "Is {...} of use?"
    for rules in (FREE, FORCED):
        text = f"{begin}{thought}</think>\n\n{call if rules is FREE else call.removeprefix('<|python_tag|>')}"
        assert answer_of(form, rules, text, kind) == text
        parts = parts_of(form, text)
        assert [part.text for part in parts if isinstance(part, Reasoning)] == [thought]
        assert len(calls_of(parts)) == 1
    forced = parts_of(form, answer_of(form, FORCED, f"{begin}{thought}</think>\n\nHello!", kind))
    assert {type(part) for part in forced} == {Reasoning, ToolCall, ToolArguments}
    for text in (f"{begin}{thought}</think>\n\nHello!", f"{begin}{thought}"):
        assert answer_of(form, FREE, text, kind) == text


def test_content_of_llama_does_not_begin_as_a_call() -> None:
    """An object at the beginning would be a call without its marker."""
    for text, calls in (('{"x": 1}', 1), ('\n{"x": 1}', 0), ('x{"x": 1}', 0)):
        answer = answer_of(FORMS["llama"], FREE, text, kind="special")
        assert answer != text or text[0] == "x"
        assert len(calls_of(parts_of(FORMS["llama"], answer))) == calls


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "the parameters of 'f' must be of the type object"),
        ({"properties": {"x": {"type": 5}}}, "the parameters of 'f' do not compile: "),
        ({"properties": {"x": False}, "required": ["x"]}, "property 'x' is unsatisfiable"),
        ({"properties": {"x": {"type": "string", "pattern": "("}}}, "regex parse error: unclosed group"),
        ({"$ref": "#/$defs/x"}, "Pointer '/$defs/x' does not exist"),
        ({"enum": ["é" * (33 << 10)]}, "at most 65536 are allowed"),
        (json.loads('{"items":' * 199 + "{}" + "}" * 199), "recursion limit exceeded"),
    ],
)
def test_functions_that_no_grammar_holds_are_refused(parameters: dict[str, Any], reason: str) -> None:
    rules = CallRules((FunctionDefinition(name="f", parameters=parameters),), forced=True, single=False)
    with pytest.raises(ApiError) as caught:
        call_grammar(rules, FORMS["hermes"], TOKENIZERS["text"])
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert reason in caught.value.message


def test_names_that_a_format_cannot_have_are_refused() -> None:
    rules = CallRules((FunctionDefinition(name='say "é"', parameters={"type": ["object", "null"]}),), True, True)
    with pytest.raises(ApiError, match="this model's calls cannot have the name"):
        call_grammar(rules, FORMS["names"], TOKENIZERS["text"])
    (call, _) = parts_of(FORMS["hermes"], answer_of(FORMS["hermes"], rules, "", kind="text"))
    assert call == ToolCall(0, 'say "é"')
