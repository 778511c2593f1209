"""Requests that are wrong: every field of an API's reference is implemented or refused by name, and so is any other."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from starlette.testclient import TestClient

from redraft.runtime.server.anthropic_fields import CountTokensRequest, MessagesRequest
from redraft.runtime.server.fields import ChatRequest, CompletionRequest, Fields
from redraft.runtime.server.responses_fields import ResponsesRequest
from tests.runtime.server.serving import USER

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
APIS: dict[str, tuple[type[Fields], dict[str, Any]]] = {
    CHAT: (ChatRequest, {"messages": [USER], "max_tokens": 3}),
    COMPLETIONS: (CompletionRequest, {"prompt": "a"}),
    RESPONSES: (ResponsesRequest, {"input": "hi"}),
    MESSAGES: (MessagesRequest, {"messages": [USER], "max_tokens": 3}),
    COUNT: (CountTokensRequest, {"messages": [USER]}),
}
"""The fields of each request, and those of a right one without the model."""


def refused(client: TestClient, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a request. Messages have the name of the field at the beginning of the text."""
    body = json.dumps({"model": "toy", **APIS[path][1], **fields}).replace('"INFINITE"', "1e999")
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return dict(error)


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_the_reference_is_known(model: type[Fields], reference: type) -> None:
    known = model.model_fields.keys() | model.refused_fields
    assert get_type_hints(reference).keys() - known == set()
    assert not model.model_fields.keys() & model.refused_fields


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, (model, _) in APIS.items() for name in sorted(model.refused_fields)]
)
def test_fields_that_are_not_supported_are_refused_by_name(shared: TestClient, path: str, name: str) -> None:
    error = refused(shared, path, {name: "x"})
    assert error["message"] == f"{name} is not supported by this server"
    if not path.startswith(MESSAGES):
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


SCHEMA = {"name": "s", "schema": {"type": "object"}}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOL, TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
FORM = {"type": "json_schema", "name": "s"}
LOGPROBS = ["message.output_text.logprobs"]
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
LARGE, INFINITE = {"enum": ["a" * 66000]}, {"maximum": "INFINITE"}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the messages of a user who sends one of these blocks."""
    return {"messages": [{**USER, "content": [*blocks]}]}


WRONG: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    CHAT: [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5_0": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop": ""}, None),
        ({"stop": [1]}, "stop.0"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        (said({"type": "image_url"}), "messages.0.content.0.type"),
        ({"messages": [{**USER, "audio": 1}]}, "messages.0.audio"),
        ({"messages": [{**USER, "mood": 1}]}, "messages.0.mood"),
        ({"tools": [CHAT_TOOL]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": INFINITE}}]},
         "tools.0.function.parameters"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"huh": True}}, "stream_options.huh"),
        ({"speculative_config": True}, "speculative_config"),
        ({"speculative_config": {"method": ""}}, "speculative_config"),
        ({"speculative_config": {"model": "x"}}, "speculative_config.model"),
        ({"speculative_config": {"controller": "x"}}, "speculative_config"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"temprature": 1}, "temprature"),
    ],
    COMPLETIONS: [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt.0"),
        ({"prompt": [1 << 31]}, None),
        ({"prompt": [-1], "echo": True}, "prompt.0"),
        ({"prompt": [[97], [1 << 32]], "echo": True}, "prompt.1.0"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"speculative_config": {"method": "x"}}, None),
    ],
    RESPONSES: [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{**USER, "phase": "commentary"}]}, "input.0.phase"),
        ({"input": [{**USER, "mood": 1}]}, "input.0.mood"),
        ({"input": [USER, OUTPUT]}, "input"),
        ({"input": [USER, {**CALL, "arguments": '{"x": 1', "status": "incomplete"}]}, "input.1.arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}]}, "input.0.summary"),
        ({"input": "a" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"include": LOGPROBS, "tools": [TOOL]}, "include"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": FORM}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {**FORM, "schema": LARGE}}}, "text.format.schema"),
        ({"text": {"format": {**FORM, "schema": INFINITE}}}, "text.format.schema"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**TOOL, "parameters": INFINITE}]}, "tools.0.parameters"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"n": 2}, "n"),
    ],
    MESSAGES: [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (said(), "messages.0.content"),
        (said({"type": "image", "source": {}}), "messages.0.content.0.type"),
        (said({**TEXT, "citations": []}), "messages.0.content.0.citations"),
        (said({"type": "thinking", "thinking": "x"}), "a message of the role user"),
        (said(RESULT), "messages.0.content.0.tool_call_id"),
        (said({**RESULT, "content": [{"type": "image"}]}), "messages.0.content.0.content.0.type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages.1: the beginning of an answer"),
        ({"messages": [{**USER, "mood": 1}]}, "the field messages.0.mood"),
        ({"messages": [{**USER, "content": "a" * 300}]}, "the prompt has 3"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": LARGE}}}, "the JSON schema has"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**MESSAGES_TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [MESSAGES_TOOL]}, "tools are not supported with this model"),
        ({"tool_choice": {"type": "tool"}}, "a name goes with the type tool"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "a name goes with the type tool"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "cache_control.ttl"),
        ({"service_tier": "default"}, "service_tier"),
        ({"metadata": {"user_id": "a", "mood": 1}}, "the field metadata.mood"),
        ({"stop": "x"}, "the field stop"),
    ],
    COUNT: [({"max_tokens": 5}, "the field max_tokens is unknown")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [(path, *case) for path, cases in WRONG.items() for case in cases],
    ids=lambda value: json.dumps(value)[:60],
)
def test_wrong_values_are_refused_by_name(
    shared: TestClient, path: str, fields: dict[str, Any], named: str | None
) -> None:
    error = refused(shared, path, fields)
    if path.startswith(MESSAGES):
        assert named is not None
        assert error["message"].startswith(named)
    else:
        assert error["param"] == named
        assert error["code"]  # it is counted by its code
