"""Calls that a request forces or limits, over HTTP. They are the same on trees, in batches, and as a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from redraft.runtime.server.fields import ChatRequest
from redraft.runtime.server.tool_choice import call_rules
from tests.runtime.fakes import EOS, script
from tests.runtime.server.serving import HERMES, USER, WAIT, client_of, error_of, events, toy
from tests.runtime.server.test_answers import chat, joined

DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
PARAMETERS = {"type": "object", "properties": {"x": DIGIT}, "required": ["x"], "additionalProperties": False}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.fixture(scope="module")
def refusing() -> Iterator[TestClient]:
    """A server for requests that reach no step."""
    with toy(template=HERMES) as runtime:
        yield client_of(runtime)


WITHOUT_REASONING = HERMES.removesuffix("<think></think>")
TOOLS = [tool("f"), tool("g")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "none", "tools": [tool("f", strict=True)]}, None),
        ({"tool_choice": "auto", "tools": None, "parallel_tool_calls": False}, None),
        ({"tools": [tool("f", strict=True), tool("g")]}, ("fg", False, False)),
        ({"parallel_tool_calls": False}, ("fg", False, True)),
        ({"tool_choice": "required"}, ("fg", True, False)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("fg", True, True)),
        ({"tool_choice": named("g")}, ("g", True, True)),
        ({"tool_choice": allowed("auto", "g")}, ("g", False, False)),
        ({"tool_choice": allowed("required", "g", "f"), "parallel_tool_calls": False}, ("gf", True, True)),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_choice_tells_what_may_be_called(fields: dict[str, Any], expected: tuple[str, bool, bool] | None) -> None:
    body = {"model": "toy", "messages": [USER], "tools": TOOLS, **fields}
    rules = call_rules(ChatRequest.model_validate_json(json.dumps(body)))
    found = rules and ("".join(function.name for function in rules.functions), rules.forced, rules.single)
    assert found == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("f")}, "tool_choice"),
        ({"tool_choice": named("h")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f", "h")}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("any", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {**named("f"), "mood": 1}}, "tool_choice.mood"),
        ({"tool_choice": "required", "tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool("f", strict=True, parameters={"type": "nothing"})]}, "tools"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tool_choice": "required", "ignore_eos": True}, None),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_choices_that_cannot_be_met_are_refused(
    refusing: TestClient, fields: dict[str, Any], param: str | None
) -> None:
    assert error_of(chat(refusing, **{"tools": TOOLS, **fields}), 400)["param"] == param


def calls_of(answer: Any, stream: bool = False) -> list[tuple[str, Any]]:
    """Return the calls of an answer that has nothing else."""
    (choice,) = joined(events(answer)) if stream else answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_would_not_call_calls_if_it_must(stream: bool) -> None:
    with toy(template=WITHOUT_REASONING) as runtime:
        client = client_of(runtime)
        for choice in (named("g"), allowed("required", "g")):
            fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
            ((name, arguments),) = calls_of(chat(client, **fields, temperature=1.0, seed=1), stream)
            assert (name, arguments.keys()) == ("g", {"x"})
        (choice,) = chat(client, tools=TOOLS, max_tokens=9).json()["choices"]
        assert choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("strict", "x"), [(False, 55), (True, 5)])
def test_strict_arguments_follow_the_schema_also_if_no_call_is_forced(strict: bool, x: int, stream: bool) -> None:
    said = b'<think>Which?</think>So: <tool_call>{"name": "f", "arguments": {"x": 55}}</tool_call>'
    rule = script([*said, EOS], len("user: hi\nassistant: <tool_call>1</tool_call><think></think>"))
    with toy(rule, HERMES) as runtime:
        answer = chat(client_of(runtime), tools=[tool("f", strict=strict)], stream=stream, max_tokens=130)
        (choice,) = joined(events(answer)) if stream else answer.json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Which?", "So: ")
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": x}


def test_calls_are_the_same_on_trees_and_in_mixed_batches(pool: ThreadPoolExecutor) -> None:
    plain = {"speculative_config": False}
    trees = {"speculative_config": {"num_speculative_tokens": 6, "controller": "fixed"}}
    fields = {"tools": TOOLS, "temperature": 1.0, "max_tokens": 150}
    asked: list[dict[str, Any]] = [
        {**fields, "tool_choice": "required", "seed": 1},
        {**fields, "tool_choice": named("f"), "seed": 2, "n": 2},
        {**fields, "tools": [tool("g", strict=True)], "seed": 3, "max_tokens": 40},
        {"seed": 4, "temperature": 1.0, "max_tokens": 40},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS}}, "seed": 5},
    ]

    def choices(client: TestClient, one: dict[str, Any]) -> Any:
        return chat(client, **one).json()["choices"]

    with toy(template=WITHOUT_REASONING) as runtime:
        client = client_of(runtime)
        expected = [choices(client, {**one, **plain}) for one in asked]
        for how in (trees, {}):
            found = [pool.submit(choices, client, {**one, **how}) for one in asked]
            assert [one.result(WAIT) for one in found] == expected
    assert [choice["finish_reason"] for choices in expected[:2] for choice in choices] == ["tool_calls"] * 3
