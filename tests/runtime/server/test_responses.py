"""OpenAI's Responses: a stream has the items of the whole answer, which are those of a chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.server.fields import parse
from redraft.runtime.server.responses_fields import ResponsesRequest
from redraft.runtime.server.responses_request import chat_of_response
from tests.runtime.fakes import EOS, NO_NUMBERS, mixing_rule, script
from tests.runtime.server.serving import HERMES, USER, WAIT, client_of, error_of, listening, named_events, toy

PATH = "/v1/responses"
FIXED = {"num_speculative_tokens": 3, "controller": "fixed"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", **FUNCTION}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
SAID = '<think>why\n</think>\nYes.\n<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>\n Done <b>'
PROMPT = "user: hi\nassistant: "
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def predicted(text: str) -> dict[str, Any]:
    """Return fields of a request that drafts this text, several tokens a step."""
    return {"speculative_config": FIXED, "prediction": {"type": "content", "content": text}}


def respond(client: TestClient, **fields: Any) -> Any:
    return client.post(PATH, json={"model": "toy", "input": "hi", "max_output_tokens": 30, **fields})


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": "toy", "messages": [USER], "max_tokens": 30, **fields})


def chat_of(items: Any, **fields: Any) -> dict[str, Any]:
    """Return the fields of the chat that a request becomes."""
    body = json.dumps({"model": "m", "input": items, **fields}).encode()
    chat = chat_of_response(parse(ResponsesRequest, body, False)).chat(False)
    return chat.model_dump(exclude_none=True, warnings=False)  # tags are read from bodies


def whole(response: Any) -> dict[str, Any]:
    """Return an answer, whose form is checked."""
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return dict(response.json())


def streamed(response: Any) -> dict[str, Any]:
    """Return the response of the last event of a stream, whose events and their order are checked."""
    events = named_events(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    middle = iter(events[2:-1])
    for event in middle:
        assert event["type"] == "response.output_item.added"
        assert (event["output_index"], event["item"]["status"]) == (len(items), "in_progress")
        items.append(streamed_item(event["item"], middle, len(items)))
    final: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{final['status']}"
    assert final["output"] == items
    assert final["id"] == events[0]["response"]["id"]
    return final


def streamed_item(begun: dict[str, Any], events: Any, index: int) -> dict[str, Any]:
    """Read the events of an item to its last one. Returns the item that the deltas make."""
    kind = begun["type"]
    name = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}[kind]
    field = "arguments" if kind == "function_call" else "text"
    text, logprobs, last, part = "", [], "", None
    if kind != "function_call":
        event = next(events)
        assert (event["type"], event["part"]["text"]) == ("response.content_part.added", "")
        part = event["part"]
    for event in events:
        if event["type"] == "response.output_item.done":
            assert last == ("response.content_part.done" if part else f"response.{name}.done")
            made = {**begun, "status": event["item"]["status"]}
            made |= {"content": [part]} if part else {"arguments": text}
            assert event["item"] == made
            return dict(made)
        assert (event["item_id"], event["output_index"]) == (begun["id"], index)
        last = event["type"]
        if last == f"response.{name}.delta":
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif last == f"response.{name}.done":
            assert (event[field], event.get("logprobs", [])) == (text, logprobs)
            if part:
                part |= {"text": text} | ({"logprobs": logprobs} if kind == "message" else {})
        else:
            assert (last, event["part"]) == ("response.content_part.done", part)
    raise AssertionError("the item has no end")


def texts(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the type and text of each item."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in output
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 1.0, "seed": 7}, {"stop": ["c", "dd"]}, {"speculative_config": FIXED, **LOGPROBS},
        {"speculative_config": False},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"const": "xy"}}}},
    ],
    ids=lambda fields: next(iter(fields), "plain"),
)  # fmt: skip
def test_a_stream_has_the_items_of_the_whole_answer_and_the_text_of_a_chat(
    shared: TestClient, fields: dict[str, Any]
) -> None:
    given = whole(respond(shared, **fields))
    final = streamed(respond(shared, stream=True, **fields))
    assert final["output"] == given["output"]
    same = {name: value for name, value in fields.items() if name in ("temperature", "seed", "stop")}
    if "text" in fields:
        schema = {"name": "s", "schema": {"const": "xy"}}
        same["response_format"] = {"type": "json_schema", "json_schema": schema}
    (choice,) = chat(shared, **same).json()["choices"]
    assert texts(given["output"]) == [("message", choice["message"]["content"])]
    used = given["usage"]
    assert used["input_tokens"] == len(PROMPT)
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["output_tokens_details"] == {"reasoning_tokens": 0}
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 16
    assert given["redraft"].keys() == final["redraft"].keys()
    assert given["system_fingerprint"] == final["system_fingerprint"]


@pytest.mark.parametrize("config", [{"speculative_config": False}, predicted(SAID)])
def test_reasoning_texts_and_calls_are_items(config: dict[str, Any]) -> None:
    """They do not depend on how many tokens a step accepts, and neither do the reasoning tokens."""
    prompt = len(f"{PROMPT}<tool_call>1</tool_call><think></think>")
    with toy(script([*SAID.encode(), EOS], prompt), HERMES) as runtime:
        client = client_of(runtime)
        fields = {"tools": [TOOL], "max_output_tokens": 150, **config}
        given, final = whole(respond(client, **fields)), streamed(respond(client, stream=True, **fields))
        (choice,) = chat(client, tools=[CHAT_TOOL], max_tokens=150).json()["choices"]
    assert final["output"] == given["output"]
    assert texts(given["output"]) == [
        ("reasoning", "why"), ("message", "Yes."), ("function_call", '{"x": "é"}'), ("message", " Done <b>"),
    ]  # fmt: skip
    assert {item["status"] for item in given["output"]} == {"completed"}
    (call,) = choice["message"]["tool_calls"]
    assert (given["output"][2]["call_id"], given["output"][2]["name"]) == (call["id"], "f")
    assert given["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>why\n</think>")}
    assert (given["status"], given["incomplete_details"], given["error"]) == ("completed", None, None)


def test_an_answer_that_its_limit_cuts_is_incomplete() -> None:
    with toy(script(SAID.encode(), len(f"{PROMPT}<think></think>")), HERMES) as runtime:
        client = client_of(runtime)
        given = whole(respond(client, max_output_tokens=9))
        assert streamed(respond(client, max_output_tokens=9, stream=True))["output"] == given["output"]
    assert texts(given["output"]) == [("reasoning", "wh")]
    assert given["output"][0]["status"] == "incomplete"
    assert given["usage"]["output_tokens_details"] == {"reasoning_tokens": 9}
    assert (given["status"], given["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_an_answer_without_text_has_an_empty_message() -> None:
    with toy(script([EOS], len(PROMPT))) as runtime:
        client = client_of(runtime)
        given = whole(respond(client, **LOGPROBS))
        assert streamed(respond(client, stream=True, **LOGPROBS))["output"] == given["output"]
    assert texts(given["output"]) == [("message", "")]
    assert len(given["output"][0]["content"][0]["logprobs"]) == 1  # that of the token that ends the text


@pytest.mark.parametrize("config", [{"speculative_config": False}, predicted("<think>a</think>é.")])
def test_logprobs_are_those_of_the_message(config: dict[str, Any]) -> None:
    said = "<think>a</think>é."
    with toy(script([*said.encode(), EOS], len(f"{PROMPT}<think></think>")), HERMES) as runtime:
        client = client_of(runtime)
        fields = {**LOGPROBS, **config}
        given, final = whole(respond(client, **fields)), streamed(respond(client, stream=True, **fields))
        (choice,) = chat(client, logprobs=True, top_logprobs=2).json()["choices"]
    assert final["output"] == given["output"]
    found = given["output"][1]["content"][0]["logprobs"]
    assert [one["bytes"] for one in found[:3]] == [[0xC3], [0xA9], [ord(".")]]
    assert found == choice["logprobs"]["content"][len("<think>a</think>") :]


def test_an_answer_can_be_sent_back_and_is_the_message_of_a_chat() -> None:
    prompt = len(f"{PROMPT}<tool_call>1</tool_call><think></think>")
    with toy(script([*SAID.encode(), EOS], prompt), HERMES) as other:
        client = client_of(other)
        fields = {"tools": [TOOL], "max_output_tokens": 150}
        given = whole(respond(client, **fields))
        (choice,) = chat(client, tools=[CHAT_TOOL], max_tokens=150).json()["choices"]
    sent = [item.model_dump(mode="json") for item in Response.model_validate(given).output]
    _, found, after = chat_of([USER, *sent])["messages"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    assert found["content"] + after["content"] == message["content"]
    assert found == {**message, "content": "Yes."}


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": [{"type": "input_text", "text": "e"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": "one", "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1", "caller": None},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "three"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}], "encrypted_content": None},
        {"role": "assistant", "content": "four"},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("c1", "f", "{}"), ("c2", "g", '{"x": 1}'))
    ]
    assert chat_of(items, instructions="i")["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": text} for text in "ide"]},
        {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
        {"role": "assistant", "reasoning_content": "hm", "content": "three"},
        {"role": "assistant", "reasoning_content": "so", "content": "four"},
    ]


def test_instructions_and_leading_items_are_one_system_message() -> None:
    assert chat_of("hi", instructions="")["messages"] == [USER]
    system = {"role": "system", "content": "s"}
    assert chat_of([system, USER], instructions="")["messages"] == [system, USER]
    assert chat_of([USER, system], instructions="s")["messages"] == [system, USER, system]
    first, *others = chat_of([{**system, "role": "developer"}, system, USER])["messages"]
    assert (first["content"], others) == ([{"type": "text", "text": "s"}] * 2, [USER])


def test_text_after_a_call_is_another_message() -> None:
    text = {"role": "assistant", "content": "x"}
    items = [USER, text, CALL, {**CALL, "call_id": "c2"}, text, {**CALL, "call_id": "c3"}]
    found = chat_of(items)["messages"]
    assert [(one["content"], [call["id"] for call in one["tool_calls"]]) for one in found[1:]] == [
        ("x", ["c1", "c2"]), ("x", ["c3"]),
    ]  # fmt: skip


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}


def test_errors_name_the_item_that_is_wrong(shared: TestClient) -> None:
    """A message of the chat is the item that it came from."""
    items = [USER, {"role": "assistant", "content": "x"}, {**CALL, "arguments": "[]"}, OUTPUT]
    message = error_of(respond(shared, instructions="i", input=items), 400)["message"]
    assert message.startswith("input.2.arguments: ")
    message = error_of(respond(shared, instructions="i", input=[USER, OUTPUT]), 400)["message"]
    assert message.startswith("input.1.tool_call_id ")


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}],
            }}},
        ),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tools": [{**TOOL, "strict": True}]}, {"tools": [{**CHAT_TOOL, "function": {**FUNCTION, "strict": True}}]}),
    ],
    ids=str,
)  # fmt: skip
def test_choices_of_tools_are_those_of_chats(fields: dict[str, Any], same: dict[str, Any]) -> None:
    found = chat_of([USER], **{"tools": [TOOL], **fields})
    names = ("tools", "tool_choice", "parallel_tool_calls")
    assert {name: found[name] for name in names if name in found} == {"tools": [CHAT_TOOL], **same}


def test_every_other_field_is_accepted_and_told(shared: TestClient) -> None:
    fields = {
        "instructions": "i", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": -1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"97": 1},
        "stop": "zz", "max_output_tokens": 3, "ignore_eos": True, "user": "a", "safety_identifier": "b",
        "cache_salt": "c", "priority": 1, "service_tier": "auto", "store": False, "background": False,
        "prompt_cache_key": "k", "parallel_tool_calls": True, "tool_choice": "auto", "truncation": "disabled",
        "metadata": {"a": "b"}, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "chat_template_kwargs": {"mood": "good"}, "text": {"format": {"type": "text"}}, "include": [],
        "reasoning": {"context": "auto"}, "prediction": {"type": "content", "content": "abc"},
    }  # fmt: skip
    given = whole(respond(shared, **fields))
    for name in ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "user", "text"):
        assert given[name] == fields[name]
    options = {"include_obfuscation": False}
    assert streamed(respond(shared, stream=True, stream_options=options, **fields))["output"]


def test_unknown_fields_may_be_allowed(runtime: Runtime) -> None:
    client = client_of(runtime, allow_unknown_fields=True)
    assert respond(client, temprature=1, speculative_config={"mood": 1}).status_code == 200
    assert error_of(respond(client, previous_response_id="x"), 400)["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_fail(stream: bool) -> None:
    def rule(tokens: list[int]) -> int:
        return NO_NUMBERS if len(tokens) > len(PROMPT) + 5 else mixing_rule(tokens)

    with toy(rule) as runtime:
        answer = respond(client_of(runtime), stream=stream, temperature=1.0, seed=1, speculative_config=False)
    if not stream:
        assert error_of(answer, 500)["code"] == "request_failed"
        return
    events = named_events(answer)
    for event in events:
        EVENT.validate_python(event)
    error, failed = events[-2:]
    assert (error["type"], error["code"], failed["type"]) == ("error", "request_failed", "response.failed")
    assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
    assert failed["response"]["error"]["message"] == error["message"]
    assert failed["sequence_number"] == error["sequence_number"] + 1 == len(events) - 1


def test_openais_client_reads_responses() -> None:
    prompt = len(f"{PROMPT}<tool_call>1</tool_call><think></think>")
    asked: Any = {"model": "toy", "input": "hi", "tools": [TOOL], "max_output_tokens": 150}
    with (
        toy(script([*SAID.encode(), EOS], prompt), HERMES) as runtime,
        listening(runtime) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT) as client,
    ):
        given = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**asked, previous_response_id="x")
    assert given.output_text == "Yes. Done <b>"
    assert final.output_text == given.output_text
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "message"]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
