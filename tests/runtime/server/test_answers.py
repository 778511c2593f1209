"""Chats and completions: a stream has the choices of a whole answer, and the figures are those of the runtime."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models

from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.server.prompts import fill_in_prompt
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.text.tokenizer import Tokenizer
from tests.runtime.fakes import EOS, VOCABULARY, byte_text, script
from tests.runtime.server.serving import HERMES, USER, client_of, events, toy

PROMPT = "user: hi\nassistant: "
CALL = '<think>why</think>Yes. <tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
FIXED = {"num_speculative_tokens": 3, "controller": "fixed"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": "toy", "messages": [USER], **fields})


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"model": "toy", "prompt": "abc", **fields})


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the choices of a stream of a chat, in the form of a whole answer."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found.setdefault(
                part["index"], {"index": part["index"], "message": {"content": None, "refusal": None}, "logprobs": None}
            )
            message, delta = choice["message"], part["delta"]
            message.update({"role": delta["role"]} if "role" in delta else {})
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if part["logprobs"]:
                known = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"] = {**known, "content": known["content"] + part["logprobs"]["content"]}
            choice["finish_reason"] = part["finish_reason"]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"stop": ["c", "dd"]},
        {"logprobs": True, "top_logprobs": 2, "speculative_config": FIXED},
        {"speculative_config": False},
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
        {"prediction": {"type": "content", "content": "cdefb"}},
    ],
    ids=lambda fields: next(iter(fields), "plain"),
)
def test_a_stream_has_the_choices_of_the_whole_answer(shared: TestClient, fields: dict[str, Any]) -> None:
    whole = chat(shared, max_tokens=30, **fields).json()
    chunks = events(chat(shared, max_tokens=30, stream=True, **fields))
    assert joined(chunks) == whole["choices"]
    if "logprobs" in fields:
        assert len(chunks) < 30 == len(whole["choices"][0]["logprobs"]["content"])
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_texts_are_those_of_the_runtime(runtime: Runtime, client: TestClient) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    (expected,) = runtime.generate([PROMPT], params)
    (choice,) = chat(client, max_completion_tokens=30, temperature=0.8, seed=3).json()["choices"]
    assert choice["message"]["content"] == expected.text
    (choice,) = complete(client, prompt=PROMPT, max_tokens=30, temperature=0.8, seed=3).json()["choices"]
    assert choice["text"] == expected.text


def test_without_a_seed_texts_differ_and_the_answer_tells_the_seed(shared: TestClient) -> None:
    first, second = (complete(shared, temperature=1.5, max_tokens=30, n=2).json() for _ in range(2))
    assert first["choices"] != second["choices"]
    again = complete(shared, temperature=1.5, max_tokens=30, n=2, seed=first["redraft"]["seed"]).json()
    assert again["choices"] == first["choices"]
    assert first["choices"][0]["text"] != first["choices"][1]["text"]


def test_the_last_chunk_has_the_figures(runtime: Runtime, client: TestClient) -> None:
    fields = {"max_tokens": 30, "n": 2, "speculative_config": FIXED}
    whole = chat(client, **fields).json()
    chunks = events(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    prompt = len(runtime.encode(PROMPT))
    used, figures = whole["usage"], whole["redraft"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (prompt, 60, prompt + 60)
    assert figures["tokens_per_step"] == 60 / figures["steps"] > 1
    assert 60 - figures["steps"] <= figures["accepted"] <= figures["drafted"]
    last = chunks[-1]["usage"]
    assert last["total_tokens"] == used["total_tokens"]
    cached = [found["prompt_tokens_details"]["cached_tokens"] for found in (used, last)]
    assert cached == [0, prompt - prompt % 16]  # rows are kept in blocks
    without = events(chat(client, stream=True, **fields))
    assert ["usage" in chunk for chunk in without] == [False] * len(without)
    assert ["redraft" in chunk for chunk in without] == [False] * (len(without) - 1) + [True]


def test_tokens_of_a_prediction_are_counted(client: TestClient) -> None:
    fixed = {"max_tokens": 30, "speculative_config": FIXED}  # else a slow step may cost the draft
    text = chat(client, max_tokens=30).json()["choices"][0]["message"]["content"]
    right = chat(client, **fixed, prediction={"type": "content", "content": text}).json()
    counted = right["usage"]["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] > 10
    assert counted["rejected_prediction_tokens"] == 0
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": "zzzz"}]
    wrong = chat(client, **fixed, prediction={"type": "content", "content": parts}).json()
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    assert wrong["choices"] == right["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_tool_calls_are_apart(stream: bool) -> None:
    said = [*CALL.encode(), EOS]
    prompt = len(f"{PROMPT}<tool_call>1</tool_call><think></think>")
    with toy(script(said, prompt), HERMES) as runtime:
        answer = chat(client_of(runtime), tools=[TOOL], stream=stream, max_tokens=150)
        (choice,) = joined(events(answer)) if stream else answer.json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "Yes. ")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert len(call["id"]) == 9
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_could_have_been_a_call_is_content(stream: bool) -> None:
    said = [*b"Yes <tool_ca", EOS]
    with toy(script(said, len(f"{PROMPT}<tool_call>1</tool_call><think></think>")), HERMES) as runtime:
        answer = chat(client_of(runtime), tools=[TOOL], stream=stream)
        (choice,) = joined(events(answer)) if stream else answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes <tool_ca", "stop")


def test_tools_that_may_not_be_called_are_not_in_the_prompt() -> None:
    said = [*CALL.encode(), EOS]
    with toy(script(said, len(f"{PROMPT}<think></think>")), HERMES) as runtime:
        fields = {"tools": [TOOL], "tool_choice": "none", "max_tokens": 150}
        (choice,) = chat(client_of(runtime), **fields).json()["choices"]
    assert choice["message"]["content"] == CALL.partition("</think>")[2]
    assert choice["finish_reason"] == "stop"


def test_a_conversation_with_tool_calls_reaches_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}|{{ m.content }}|"
        "{% for call in m.tool_calls %}{{ call.function.arguments.x }}{{ call.index }}{% endfor %};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}, "index": 0}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    with toy(template=template) as runtime:
        client = client_of(runtime)
        tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "system|be \nbrief|;assistant||5;tool|7|;"


def test_prompts_of_a_list_have_their_own_choices(shared: TestClient) -> None:
    fields = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 10}
    assert complete(shared, prompt=["abc", [98, 99]], **fields).status_code == 400
    both = complete(shared, prompt=["abc", "bc"], **fields).json()
    alone = [
        complete(shared, **{**fields, "prompt": prompt, "seed": seed}).json()
        for prompt, seed in (("abc", 5), ([98, 99], 7))
    ]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in both["choices"]] == expected
    assert both["usage"]["prompt_tokens"] == 5
    equal = complete(shared, prompt=["abc"] * 3, temperature=1.0).json()
    assert len({choice["text"] for choice in equal["choices"]}) == 3


def test_a_prompt_is_echoed(shared: TestClient) -> None:
    text = complete(shared).json()["choices"][0]["text"]
    assert len(text) == 16  # OpenAI's default
    assert complete(shared, echo=True).json()["choices"][0]["text"] == "abc" + text
    chunks = events(complete(shared, prompt=[97, 98, 99], echo=True, stream=True))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "abc" + text


def test_a_stream_of_a_completion_has_its_logprobs(shared: TestClient) -> None:
    (whole,) = complete(shared, logprobs=2).json()["choices"]
    chunks = events(complete(shared, logprobs=2, stream=True))
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in whole["logprobs"]} == whole["logprobs"]
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    assert len(whole["logprobs"]["top_logprobs"][0]) == 2


def test_a_text_is_filled_in_only_with_tokens_for_that(shared: TestClient) -> None:
    error = complete(shared, suffix="z").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    tokenizer = byte_text()
    tokenizer.tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    before, after, middle = range(VOCABULARY, VOCABULARY + 3)
    assert fill_in_prompt(tokenizer, "ab", "") == [before, 97, 98, after, middle]


def test_tokens_have_the_text_that_they_have_inside_a_text() -> None:
    """A decoder of SentencePiece strips the first space, and its byte tokens have names."""
    tokenizer = tokenizers.Tokenizer(models.BPE({"<0xC3>": 0, "<0xA9>": 1, "\u2581a": 2, "<s>": 3}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    texts = TokenTexts(Tokenizer(tokenizer))
    assert [texts.of(token) for token in (2, 3)] == [(" a", b" a"), ("<s>", b"<s>")]
    assert [texts.of(token) for token in (0, 1)] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]
