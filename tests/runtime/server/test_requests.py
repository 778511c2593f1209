"""Requests of chats and completions: bodies, prompts and fields, and the forms that answers must have."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from redraft.runtime import Runtime
from redraft.runtime.loop import request_maker
from redraft.runtime.sampling.constraints import Constraint
from redraft.runtime.server import endpoints
from redraft.runtime.server.fields import ChatRequest, CompletionRequest, parse
from redraft.runtime.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, script
from tests.runtime.server.serving import HERMES, USER, client_of, error_of, events, toy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post(CHAT, json={"model": "toy", "messages": [USER], "max_tokens": 3, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1.5] * 999}, {"prompt": [[], *[[None] * 99] * 99]}, {"prompt": ["a", *[1] * 99]},
        {"logit_bias": {str(token): "x" for token in range(1999)}}, {"messages": [{}] * 999}, {"tools": [{}] * 999},
        {"messages": [{"role": "user", "content": [{}] * 999}]}, {"modalities": [1] * 999},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 999}]},
        {"prediction": {"type": "content", "content": [{}] * 999}},
    ],
    ids=lambda fields: json.dumps(fields)[:50],
)  # fmt: skip
def test_wrong_elements_cost_few_errors(fields: dict[str, Any]) -> None:
    """An error takes some kilobytes, and its element a few bytes."""
    model = CompletionRequest if "prompt" in fields else ChatRequest
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps({"model": "toy", "messages": [USER], **fields}))
    assert caught.value.error_count() <= 4  # those of one element


def test_a_large_body_is_read_by_another_thread(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(endpoints, "parse", noted)
    for size, status in ((10, 200), (100_000, 400)):
        assert shared.post(COMPLETIONS, json={"model": "toy", "prompt": "a" * size}).status_code == status
    small, large = threads
    assert "AnyIO worker" in large
    assert "AnyIO worker" not in small


def test_a_template_takes_all_variables_but_those_of_the_server(shared: TestClient) -> None:
    for name in inspect.signature(Tokenizer.apply_chat_template).parameters.keys() - {"variables"}:
        error = error_of(chat(shared, chat_template_kwargs={name: 1}), 400)
        assert error["param"] == f"chat_template_kwargs.{name}"


def test_unknown_fields_may_be_allowed_but_not_those_that_are_refused(runtime: Runtime) -> None:
    client = client_of(runtime, allow_unknown_fields=True)
    assert chat(client, temprature=1).status_code == 200
    assert error_of(chat(client, audio={}), 400)["param"] == "audio"


def test_every_other_field_is_accepted(shared: TestClient) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": -1, "n": 1, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"97": 1}, "stop": "zz",
        "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 0, "ignore_eos": True, "user": "a",
        "safety_identifier": "b", "cache_salt": "c", "priority": 1, "modalities": ["text"], "service_tier": "auto",
        "store": False, "prompt_cache_key": "k", "parallel_tool_calls": False, "tool_choice": "auto",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "controller": "adaptive"},
        "chat_template_kwargs": {"mood": "good"}, "response_format": {"type": "text"},
        **dict.fromkeys(ChatRequest.refused_fields),
    }  # fmt: skip
    assert chat(shared, **fields).status_code == 200
    assert events(chat(shared, stream=True, stream_options={"include_usage": False}, **fields))


def test_answers_may_have_to_be_json(shared: TestClient) -> None:
    def form(schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}

    (choice,) = chat(shared, response_format=form({"const": "xyz"}), max_tokens=40).json()["choices"]
    assert json.loads(choice["message"]["content"]) == "xyz"
    (choice,) = chat(shared, response_format={"type": "json_object"}).json()["choices"]
    assert choice["message"]["content"].startswith("{")
    assert "schema" in error_of(chat(shared, response_format=form({"type": 5})), 400)["message"]
    error = error_of(chat(shared, response_format=form({"enum": ["é" * (33 << 10)]})), 400)
    assert error["param"] == "response_format.json_schema.schema"


def test_choices_share_a_compiled_grammar(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counting(*arguments: Any) -> Constraint:
        compiled.append(Constraint(*arguments))
        return compiled[-1]

    monkeypatch.setattr(request_maker, "Constraint", counting)
    schema = {"name": "s", "schema": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 4}}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60, "temperature": 1.0}
    texts = [choice["message"]["content"] for choice in chat(shared, n=4, seed=1, **fields).json()["choices"]]
    assert len(compiled) == 1
    assert {item for text in texts for item in json.loads(text)} <= {"x", "y"}
    alone = [chat(shared, seed=1 + number, **fields).json()["choices"][0] for number in range(4)]
    assert [choice["message"]["content"] for choice in alone] == texts


def test_an_answer_that_must_be_json_has_no_reasoning() -> None:
    """The prompt has the opening marker of reasoning, and the constraint excludes the closing one."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "xyz"}}}
    with toy(template=HERMES.removesuffix("</think>")) as runtime:
        client = client_of(runtime)
        (choice,) = chat(client, response_format=form, max_tokens=40).json()["choices"]
        (free,) = chat(client, response_format={"type": "text"}).json()["choices"]
    assert json.loads(choice["message"]["content"]) == "xyz"
    assert "reasoning_content" not in choice["message"]
    assert free["message"]["reasoning_content"]


def test_tools_and_a_form_exclude_each_other() -> None:
    with toy(template=HERMES) as runtime:
        client, form = client_of(runtime), {"response_format": {"type": "json_object"}}
        error = error_of(chat(client, tools=[TOOL], **form), 400)
        assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
        assert "response_format with tools" in error["message"]
        assert chat(client, tools=[TOOL], tool_choice="none", **form).status_code == 200
        assert chat(client, tools=[TOOL], response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_no_character_cuts_an_event(character: str) -> None:
    """`str.splitlines`, by which some clients split a stream, ends lines at them."""
    said = [*character.encode(), EOS]
    with toy(script(said, len("user: hi\nassistant: "))) as runtime:
        chunks = events(chat(client_of(runtime), stream=True, max_tokens=9))
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == character


def test_other_requests_have_errors_of_the_same_form(shared: TestClient) -> None:
    error_of(shared.post(COMPLETIONS, content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    error_of(shared.get("/v2"), 404)
    answer = shared.get(COMPLETIONS)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert error_of(chat(shared, model="gpt"), 404)["code"] == "model_not_found"
    assert error_of(shared.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


def test_prompts_that_are_too_long_are_refused_and_not_cut(runtime: Runtime) -> None:
    client = client_of(runtime, max_prompt_tokens=20)
    for prompt in ("a" * 21, "a" * 100_000, [97] * 21):
        answer = client.post(COMPLETIONS, json={"model": "toy", "prompt": prompt})
        assert error_of(answer, 400)["code"] == "context_length_exceeded"
    assert client.post(COMPLETIONS, json={"model": "toy", "prompt": "a" * 20}).status_code == 200
    answer = client_of(runtime).post(COMPLETIONS, json={"model": "toy", "prompt": "a" * 200})
    assert error_of(answer, 400)["code"] == "context_length_exceeded"


def test_a_model_without_a_template_has_no_chats() -> None:
    with toy(template=None) as runtime:
        assert error_of(chat(client_of(runtime)), 400)["code"] == "no_chat_template"


def test_a_template_that_raises_refuses_the_messages_alone() -> None:
    with toy(template="{{ raise_exception('no ' + messages[0].content) }}") as runtime:
        error = error_of(chat(client_of(runtime)), 400)
    assert "no hi" in error["message"]


def test_tokens_and_texts(shared: TestClient) -> None:
    answer = shared.post("/tokenize", json={"prompt": "aé"}).json()
    assert answer == {"tokens": [97, 0xC3, 0xA9], "count": 3, "max_model_len": 200}
    assert shared.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}
    error_of(shared.post("/detokenize", json={"tokens": [1 << 40]}), 400)
    assert shared.post("/detokenize", json={"tokens": [97] * 200}).json() == {"prompt": "a" * 200}
    error = error_of(shared.post("/detokenize", json={"tokens": [97] * 201}), 400)
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")
    error_of(shared.post("/tokenize", json={"prompt": "a", "messages": [USER]}), 400)


def test_texts_to_tokenize_have_the_limits_of_prompts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(runtime, max_prompt_tokens=20)
    assert client.post("/tokenize", json={"prompt": "a" * 20}).json()["count"] == 20
    for body in ({"prompt": "a" * 21}, {"messages": [{"role": "user", "content": "a" * 21}]}):
        error = error_of(client.post("/tokenize", json=body), 400)
        assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")

    class Rendered(JSONResponse):
        def render(self, content: Any) -> bytes:
            with pytest.raises(RuntimeError):  # it would hold up all others
                asyncio.get_running_loop()
            return super().render(content)

    monkeypatch.setattr(endpoints, "JSONResponse", Rendered)
    assert client.post("/tokenize", json={"prompt": "a"}).json()["tokens"] == [97]


def test_the_served_model_is_described(shared: TestClient) -> None:
    (model,) = shared.get("/v1/models").json()["data"]
    assert model == shared.get("/v1/models/toy").json()
    assert (model["id"], model["max_model_len"], model["default_method"]) == ("toy", 200, "ngram")
