"""Anthropic's Messages: a stream has the blocks of the whole answer, which are the parts of a chat's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.server.anthropic_answer import anthropic_error
from redraft.runtime.server.anthropic_fields import MessagesRequest
from redraft.runtime.server.anthropic_request import chat_of_messages
from redraft.runtime.server.app import create_app
from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.fields import parse
from redraft.runtime.server.settings import ServerSettings
from tests.runtime.fakes import EOS, NO_NUMBERS, mixing_rule, script
from tests.runtime.server.serving import HERMES, TEMPLATE, USER, client_of, named_events, toy

PATH = "/v1/messages"
FIXED = {"num_speculative_tokens": 3, "controller": "fixed"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ARGUMENTS = '{"x": "é", "y": [1, 2.5]}'
SAID = f'<think>why\n</think>Yes.\n<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>\n Done <b>'
PROMPT = "user: hi\nassistant: "
THINKING = f"{PROMPT}<think></think>"
CALLING = f"{PROMPT}<tool_call>1</tool_call><think></think>"
SWITCH = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post(PATH, json={"model": "toy", "messages": [USER], "max_tokens": 30, **fields})


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": "toy", "messages": [USER], "max_tokens": 30, **fields})


def chat_of(messages: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of the chat that a request becomes."""
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages, **fields}).encode()
    chat = chat_of_messages(parse(MessagesRequest, body, False), "").chat(False)
    return chat.model_dump(exclude_none=True, warnings=False)  # tags are read from bodies


def error_of(response: Any, status: int) -> dict[str, str]:
    """Return the error of an answer, whose form is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return dict(body["error"])


def whole(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(response: Any) -> dict[str, Any]:
    """Return the message that a stream makes. The order of its events is checked."""
    events = named_events(response)
    types = [event["type"] for event in events]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    message = dict(events[0]["message"])
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    is_open, text = False, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(message["content"]))
            message["content"].append(event["content_block"])
            is_open, text = True, ""
            continue
        block = message["content"][-1]
        assert (is_open, event["index"]) == (True, len(message["content"]) - 1)
        if event["type"] == "content_block_delta":
            name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
            kind = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[block["type"]]
            assert event["delta"].keys() == {"type", name}
            assert event["delta"]["type"] == kind
            text += event["delta"][name]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
    assert not is_open
    last = events[-2]
    assert last["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    return {**message, **last["delta"], "usage": last["usage"], "redraft": last["redraft"]}


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 1.0, "seed": 7}, {"stop_sequences": ["c", "dd"]},
        {"top_k": 2, "top_p": 0.9, "temperature": 1.0, "seed": 1},
        {"speculative_config": False}, {"speculative_config": FIXED},
        {"output_config": {"format": {"type": "json_schema", "schema": {"const": "xy"}}}},
    ],
    ids=lambda fields: next(iter(fields), "plain"),
)  # fmt: skip
def test_a_stream_has_the_blocks_of_the_whole_answer_and_the_text_of_a_chat(
    client: TestClient, fields: dict[str, Any]
) -> None:
    given, final = whole(ask(client, **fields)), streamed(ask(client, stream=True, **fields))
    assert final["content"] == given["content"]
    assert (final["stop_reason"], final["stop_sequence"]) == (given["stop_reason"], given["stop_sequence"])
    same = {name: value for name, value in fields.items() if name not in ("stop_sequences", "output_config")}
    if "stop_sequences" in fields:
        same["stop"] = fields["stop_sequences"]
    if "output_config" in fields:
        schema = {"name": "s", "schema": {"const": "xy"}}
        same["response_format"] = {"type": "json_schema", "json_schema": schema}
    (choice,) = chat(client, **same).json()["choices"]
    assert given["content"] == [{"type": "text", "text": choice["message"]["content"], "citations": None}]
    assert (given["type"], given["role"], given["model"]) == ("message", "assistant", "toy")
    assert given["system_fingerprint"] == final["system_fingerprint"]
    first, later = given["usage"], final["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"]) == (len(PROMPT), 0)
    assert (later["input_tokens"], later["cache_read_input_tokens"]) == (len(PROMPT) - 16, 16)
    assert first["output_tokens"] == later["output_tokens"]


@pytest.mark.parametrize(
    "config",
    [{"speculative_config": False}, {"speculative_config": FIXED, "prediction": {"type": "content", "content": SAID}}],
)
def test_reasoning_texts_and_calls_are_blocks(config: dict[str, Any]) -> None:
    """They do not depend on how many tokens a step accepts, and neither do the reasoning tokens."""
    with toy(script([*SAID.encode(), EOS], len(CALLING)), HERMES) as runtime:
        client = client_of(runtime)
        fields = {"tools": [TOOL], "max_tokens": 150, **config}
        given, final = whole(ask(client, **fields)), streamed(ask(client, stream=True, **fields))
        (choice,) = chat(client, tools=[CHAT_TOOL], max_tokens=150).json()["choices"]
    assert final["content"] == given["content"]
    (call,) = choice["message"]["tool_calls"]
    assert given["content"] == [
        {"type": "thinking", "thinking": "why", "signature": ""},
        {"type": "text", "text": "Yes.", "citations": None},
        {"type": "tool_use", "id": call["id"], "name": "f", "input": {"x": "é", "y": [1, 2.5]}},
        {"type": "text", "text": " Done <b>", "citations": None},
    ]
    assert (given["stop_reason"], final["stop_reason"]) == ("tool_use", "tool_use")
    expected = {"thinking_tokens": len("<think>why\n</think>")}
    assert given["usage"]["output_tokens_details"] == final["usage"]["output_tokens_details"] == expected


def test_an_answer_tells_why_it_ended() -> None:
    with toy(script([*b"abc def", EOS], len(PROMPT))) as runtime:
        client = client_of(runtime)

        def reason(**fields: Any) -> tuple[str, str | None]:
            given, final = whole(ask(client, **fields)), streamed(ask(client, stream=True, **fields))
            assert (final["stop_reason"], final["stop_sequence"]) == (given["stop_reason"], given["stop_sequence"])
            return given["stop_reason"], given["stop_sequence"]

        assert reason() == ("end_turn", None)
        assert reason(max_tokens=3) == ("max_tokens", None)
        assert reason(stop_sequences=["zz", " d", "f"]) == ("stop_sequence", " d")
    with toy() as runtime:
        given = whole(ask(client_of(runtime), max_tokens=1000, ignore_eos=True))
    assert given["stop_reason"] == "model_context_window_exceeded"
    assert given["usage"]["output_tokens"] == 200 - len(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"x": 1, "y": [1, 2], "z": "abc', {"x": 1, "y": [1, 2]}), ('{"x": {"y": 1', {"x": {"y": 1}}), ("{", {}),
        ('{"x": "\\ud800"}', {}), ('{"x": 9e9999}', {}), ('{"y": 1, "x": [-9e9999', {}),
    ],
)  # fmt: skip
def test_a_call_that_the_limit_cuts_has_the_input_that_came(arguments: str, read: Any) -> None:
    said = f'<tool_call>{{"name": "f", "arguments": {arguments}'.encode()
    with toy(script(said, len(CALLING)), HERMES) as runtime:
        given = whole(ask(client_of(runtime), tools=[TOOL], max_tokens=len(said)))
    assert given["stop_reason"] == "max_tokens"
    (block,) = given["content"]
    assert block["input"] == read


def test_blocks_become_the_messages_of_a_chat() -> None:
    cached = {"type": "ephemeral"}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "one"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": "é"}}, {"type": "text", "text": " two"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
            {"type": "text", "text": "c"},
        ]},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("c2", "c3", "c4")
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c2"},
            {"type": "tool_result", "tool_use_id": "c3", "content": "no", "is_error": True},
            {"type": "tool_result", "tool_use_id": "c4", "content": [{"type": "text", "text": "no"}], "is_error": True},
        ]},
    ]  # fmt: skip

    def calls(*given: tuple[str, str]) -> list[dict[str, Any]]:
        return [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
            for name, arguments in given
        ]

    def parts(*given: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in given]

    assert chat_of(blocks, system=[{"type": "text", "text": "s"}])["messages"] == [
        {"role": "system", "content": parts("s")},
        {"role": "user", "content": parts("a", "b")},
        {
            "role": "assistant", "reasoning_content": "hm", "content": "one two",
            "tool_calls": calls(("c1", '{"x": "é"}')),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": parts("c")},
        {"role": "assistant", "tool_calls": calls(("c2", "{}"), ("c3", "{}"), ("c4", "{}"))},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "tool", "tool_call_id": "c3", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c4", "content": parts("Error:", "no")},
    ]  # fmt: skip


def test_an_answer_can_be_sent_back() -> None:
    with toy(script([*SAID.encode(), EOS], len(CALLING)), HERMES) as runtime:
        client = client_of(runtime)
        given = whole(ask(client, tools=[TOOL], max_tokens=150))
        (choice,) = chat(client, tools=[CHAT_TOOL], max_tokens=150).json()["choices"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": given["content"][2]["id"]}]}
    messages = [USER, {"role": "assistant", "content": given["content"]}, result]
    found = chat_of(messages)["messages"][1]
    assert found == {name: value for name, value in choice["message"].items() if value is not None}


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tools": [{**TOOL, "strict": True}]},
            {"tools": [{"type": "function", "function": {**CHAT_TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
        ),
    ],
    ids=str,
)
def test_choices_of_tools_are_those_of_chats(fields: dict[str, Any], same: dict[str, Any]) -> None:
    found = chat_of([USER], **{"tools": [TOOL], **fields})
    names = ("tools", "tool_choice", "parallel_tool_calls")
    assert {name: found[name] for name in names if name in found} == {"tools": [CHAT_TOOL], **same}


def test_every_other_field_is_accepted(shared: TestClient) -> None:
    cached = {"type": "ephemeral", "ttl": "5m"}
    fields = {
        "system": "s", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": -1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"97": 1}, "stop_sequences": ["zz"],
        "ignore_eos": True, "metadata": {"user_id": "a"}, "cache_salt": "c", "priority": 1, "service_tier": "auto",
        "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}, "cache_control": cached,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "chat_template_kwargs": {"mood": "x"},
        "prediction": {"type": "content", "content": "abc"}, "max_tokens": 3, "output_config": {"format": None},
    }  # fmt: skip
    assert whole(ask(shared, **fields))["content"] == streamed(ask(shared, stream=True, **fields))["content"]


def test_unknown_fields_may_be_allowed(runtime: Runtime) -> None:
    client = client_of(runtime, allow_unknown_fields=True)
    assert ask(client, temprature=1, speculative_config={"mood": 1}).status_code == 200
    assert error_of(ask(client, container="x"), 400)["message"].startswith("container")


def test_reasoning_can_be_turned_off_if_the_template_can() -> None:
    off = {"thinking": {"type": "disabled"}}
    with toy(template=SWITCH) as runtime:
        client = client_of(runtime)
        assert whole(ask(client))["usage"]["input_tokens"] == len(PROMPT)
        used = whole(ask(client, **off))["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == len(THINKING)
    with toy(template=HERMES) as runtime:
        assert error_of(ask(client_of(runtime), **off), 400)["message"].startswith("thinking.type disabled")
    with toy() as runtime:
        assert ask(client_of(runtime), **off).status_code == 200


def test_tokens_are_counted_as_a_request_has_them() -> None:
    with toy(template=HERMES) as runtime:
        client = client_of(runtime)
        fields = {"model": "toy", "messages": [USER], "system": "s", "tools": [TOOL]}
        counted = client.post(f"{PATH}/count_tokens", json=fields).json()
        used = whole(ask(client, **fields))["usage"]
        assert counted == {"input_tokens": used["input_tokens"]} == {"input_tokens": len("system: s\n" + CALLING)}
        long = {**fields, "system": "s" * 5000}  # more than the context has
        counted = client.post(f"{PATH}/count_tokens", json=long).json()
        assert counted == {"input_tokens": used["input_tokens"] + 4999}


def test_errors_have_the_types_and_statuses_of_anthropics() -> None:
    with toy() as runtime:
        client = client_of(runtime, api_keys=("one",), max_body_bytes=1000)
        assert error_of(ask(client), 401)["type"] == "authentication_error"
        for headers in ({"x-api-key": "one", "anthropic-version": "2023-06-01"}, {"Authorization": "Bearer one"}):
            assert client.post(PATH, json={}, headers=headers).status_code == 400
        assert client.post(PATH, json={}, headers={"x-api-key": "two"}).status_code == 401
        client.headers["x-api-key"] = "one"
        for answer in (ask(client), ask(client, model="x"), client.get(PATH)):
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert "request-id" not in client.get("/health").headers
        assert error_of(ask(client, model="x"), 404)["type"] == "not_found_error"
        assert error_of(client.post(f"{PATH}/batches", json={}), 404)["type"] == "not_found_error"
        assert error_of(client.get(PATH), 405)["type"] == "invalid_request_error"
        assert error_of(client.post(PATH, content=b"{}"), 415)["type"] == "invalid_request_error"
        assert error_of(ask(client, system="x" * 1000), 413)["type"] == "request_too_large"
        client.headers["host"] = "a.test"
        assert error_of(ask(client), 403)["type"] == "permission_error"
    with toy(template=None) as runtime:
        assert error_of(ask(client_of(runtime)), 400)["message"].startswith("this model has no chat template")
    for status, kind in ((429, "rate_limit_error"), (504, "timeout_error")):
        assert anthropic_error(ApiError(status, "x"))["error"]["type"] == kind


def test_a_server_that_takes_no_requests_is_overloaded() -> None:
    with toy() as runtime:
        app = create_app(runtime, ServerSettings("toy"))
        app.state.service.draining = True
        client = TestClient(app, "http://localhost")
        refused = ask(client)
        assert error_of(refused, 529)["type"] == "overloaded_error"
        assert refused.headers["retry-after"] == "1"
        assert 'reason="shutting_down"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("after", [-1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_fail(stream: bool, after: int) -> None:
    def rule(tokens: list[int]) -> int:
        return NO_NUMBERS if len(tokens) > len(PROMPT) + after else mixing_rule(tokens)

    with toy(rule) as runtime:
        answer = ask(client_of(runtime), stream=stream, temperature=1.0, seed=1, speculative_config=False)
    if not stream:
        assert error_of(answer, 500)["type"] == "api_error"
        return
    events = named_events(answer)
    assert events[-1]["error"]["type"] == "api_error"
    assert events[0]["type"] == ("message_start" if after > 0 else "error")
