"""Hostile bodies: each gets the right status, small and in OpenAI's form, and another request gets its own text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from redraft.runtime.server.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.runtime.fakes import know_costs, mixing_rule
from tests.runtime.server.serving import USER, client_of, error_of, events, toy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MODELS = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"model": "toy", "messages": [USER], "max_tokens": 3},
    COMPLETIONS: {"model": "toy", "prompt": "abc", "max_tokens": 3},
    "/tokenize": {"model": "toy", "prompt": "abc"},
    "/detokenize": {"model": "toy", "tokens": [97]},
}
LONGEST_ERROR = 4000
"""Bytes; JSON takes up to six for a character."""
MEGABYTE = "a" * (1 << 20)
WITNESS = "witness: "
NUMBERS = st.integers(-3, 300) | st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**30, -(10**30), 1e-320, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def busy() -> Iterator[TestClient]:
    """A client of a server whose queue holds few choices, so that no request takes long."""
    with pytest.MonkeyPatch.context() as patch:
        know_costs(patch)
        with toy(max_waiting=4) as runtime:
            yield client_of(runtime, max_body_bytes=4 << 20)


def check_witness(client: TestClient) -> None:
    """Ask for a text that the rule of the toy model gives, and compare."""
    tokens = list(WITNESS.encode())
    for _ in range(8):
        tokens.append(mixing_rule(tokens))
    answer = client.post(COMPLETIONS, json={"model": "toy", "prompt": WITNESS, "max_tokens": 8})
    assert answer.json()["choices"][0]["text"] == bytes(tokens[len(WITNESS) :]).decode()


def check_answer(answer: Any) -> None:
    """Check that an answer is whole, or a short error of the client."""
    if answer.status_code == 200:
        assert "error" not in answer.text or not answer.headers["content-type"].startswith("application/json")
        return
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert len(answer.content) < LONGEST_ERROR
    error_of(answer, answer.status_code)


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_values_of_every_type_get_an_answer_or_a_refusal(busy: TestClient, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([*VALID]))
    names = sorted(MODELS[path].model_fields)
    fields = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    check_answer(busy.post(path, json={**VALID[path], **fields}))


@given(st.sampled_from([*VALID]), st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_damaged_json_gets_an_answer_or_a_refusal(busy: TestClient, path: str, data: st.DataObject) -> None:
    body = bytearray(json.dumps(VALID[path]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check_answer(busy.post(path, content=bytes(body), headers=JSON))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xff\xfe{\x00}\x00",
        b'{"model": "toy"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"nul",
        b"1" * 5000,
        b'{"model": "toy", "prompt": "\xff\xc0\x80"}', b'{"model": "toy", "prompt": "\\ud800"}',
        b'{"model": "toy", "prompt": "a", "temperature": NaN}',
        b'{"model": "toy", "prompt": "a", "temperature": 1e999}',
        b'\xef\xbb\xbf{"model": "toy", "prompt": "a"}', b'{"model": "toy", "prompt": "a"} {}', b"[]", b'"toy"', b"null",
        b'{"model": "toy"}',
    ],
    ids=lambda body: ascii(body[:24]),
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(busy: TestClient, body: bytes) -> None:
    answer = busy.post(COMPLETIONS, content=body, headers=JSON)
    error_of(answer, 400)
    assert len(answer.content) < LONGEST_ERROR
    check_witness(busy)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"stop": MEGABYTE}, 400), (COMPLETIONS, {"stop": ["a", MEGABYTE]}, 400),
        (COMPLETIONS, {"stop": ["a"] * 10_000}, 400), (COMPLETIONS, {"prompt": MEGABYTE}, 400),
        (COMPLETIONS, {"prompt": [97] * 30_000}, 400), (COMPLETIONS, {"prompt": [[97]] * 2000}, 400),
        (COMPLETIONS, {"model": MEGABYTE}, 404), (COMPLETIONS, {MEGABYTE: 1}, 400),
        (COMPLETIONS, {"prompt": {MEGABYTE: MEGABYTE}}, 400), (COMPLETIONS, {"prompt": "a" * (5 << 20)}, 413),
        (COMPLETIONS, {"logit_bias": {str(n): "x" for n in range(20_000)}}, 400),
        (COMPLETIONS, {"speculative_config": {"method": MEGABYTE}}, 400),
        (COMPLETIONS, {"speculative_config": {"controller": MEGABYTE}}, 400),
        (CHAT, {"messages": [USER] * 1000}, 400), (CHAT, {"messages": [{"role": MEGABYTE, "content": ""}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * 10_000}]}, 400),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": MEGABYTE, "content": ""}]}, 400),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, 400), (CHAT, {"chat_template_kwargs": {MEGABYTE: 1}}, 200),
        ("/detokenize", {"tokens": [1 << 31]}, 400), ("/detokenize", {"tokens": [97] * 100_000}, 400),
        ("/tokenize", {"prompt": MEGABYTE}, 400),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_values_of_a_megabyte_get_a_short_answer(
    busy: TestClient, path: str, fields: dict[str, Any], status: int
) -> None:
    answer = busy.post(path, json={**VALID[path], **fields})
    assert answer.status_code == status, answer.text[:500]
    check_answer(answer)
    check_witness(busy)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 5, "maxLength": 2}, {"type": "integer", "minimum": 3, "maximum": 2},
        {"allOf": [{"type": "string"}, {"type": "number"}]}, {"enum": []}, {"not": {}}, {"$ref": "#/nowhere"},
        {"$ref": "#"}, {"type": "array", "minItems": 3, "maxItems": 1}, {"type": "nothing"},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "string", "pattern": "("}, {"type": "string", "pattern": "(?=a)b"},
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_cannot_be_met_is_refused(busy: TestClient, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = busy.post(CHAT, json={**VALID[CHAT], "response_format": form})
    error_of(answer, 400)
    assert len(answer.content) < LONGEST_ERROR
    check_witness(busy)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(a|a)*b", "(a|aa)+$", "(.*.*.*.*.*)*x", "a{0,5000}", "^(a{1,99}){1,99}$", "(((a{1,99}){1,99}){1,99})"],
)  # fmt: skip
def test_a_regex_that_explodes_elsewhere_costs_little(busy: TestClient, pattern: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": pattern}}}
    answer = busy.post(CHAT, json={**VALID[CHAT], "max_tokens": 40, "response_format": form})
    assert answer.json()["choices"][0]["message"]["content"].lstrip().startswith('"')
    check_witness(busy)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ nobody.knows.this }}",
        "{% include 'x' %}",
        "{% import 'os' as x %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}", "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__call__.__func__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1)[50] + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% set _ = messages.append(1) %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 15 }}", "{{", "{% if %}", "{{ ('%s' * 3) % (1,) }}",
    ],
    ids=str,
)  # fmt: skip
def test_a_template_that_fails_or_leaves_the_sandbox_refuses_the_messages(
    busy: TestClient, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    know_costs(monkeypatch)
    with toy(template=template) as runtime:
        client = client_of(runtime)
        for stream in (False, True):
            error = error_of(client.post(CHAT, json={**VALID[CHAT], "stream": stream}), 400)
            assert error["param"] == "messages"
            assert len(error["message"]) < LONGEST_ERROR
            assert "<class" not in error["message"]
        check_witness(client)


@pytest.mark.parametrize("name", ["raise_exception", "range", "namespace", "bos_token", "loop", "__class__", "caller"])
def test_a_variable_of_a_template_is_only_a_value(busy: TestClient, name: str) -> None:
    asked = {**VALID[CHAT], "chat_template_kwargs": {name: {"__class__": "x", "format": "{0}"}}}
    assert busy.post(CHAT, json=asked).json()["choices"] == busy.post(CHAT, json=VALID[CHAT]).json()["choices"]


def test_a_stream_cannot_be_made_to_write_events_of_its_own(busy: TestClient) -> None:
    asked = {**VALID[COMPLETIONS], "prompt": "a\n\ndata: [DONE]\n\r\u2028", "echo": True, "stream": True}
    assert events(busy.post(COMPLETIONS, json=asked))[0]["choices"][0]["text"] == asked["prompt"]
