"""OpenAI's client: whole answers, streams, both kinds of client, structured output, tools and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

Fields = dict[str, Any]


class Answer(BaseModel):
    """Short however bad the model is."""

    sort: Literal["data structure", "animal"]
    sure: bool


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def asked(model: str, messages: list[Fields]) -> Fields:
    return {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0.8, "seed": 5}


def test_models_are_listed(client: openai.OpenAI, model: str) -> None:
    assert [one.id for one in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_a_stream_has_the_text_and_usage_of_the_whole_answer(client: openai.OpenAI, asked: Fields) -> None:
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_the_async_client_gets_the_same_texts(client: openai.OpenAI, url: str, asked: Fields) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other:
            whole = await asyncio.gather(*[other.chat.completions.create(**asked) for _ in range(4)])
            stream = await other.chat.completions.create(**asked, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [streamed, *[one.choices[0].message.content or "" for one in whole]]

    expected = client.chat.completions.create(**asked).choices[0].message.content
    assert asyncio.run(ask()) == [expected] * 5


def test_choices_and_logprobs(client: openai.OpenAI, asked: Fields) -> None:
    whole = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for choice in whole.choices:
        assert choice.logprobs
        assert choice.logprobs.content
        text = "".join(token.token for token in choice.logprobs.content)
        assert text.startswith(choice.message.content or "")
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_completions(client: openai.OpenAI, model: str) -> None:
    asked: Fields = {"model": model, "prompt": ["def f(", "A queue is"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    texts = {choice.index: choice.text for choice in whole.choices}
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_structured_output(client: openai.OpenAI, asked: Fields) -> None:
    del asked["max_tokens"]
    parsed = client.chat.completions.parse(**asked, response_format=Answer).choices[0].message
    assert isinstance(parsed.parsed, Answer)
    with client.chat.completions.stream(**asked, response_format=Answer) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == parsed.parsed


def test_a_speculative_config_changes_no_text(client: openai.OpenAI, asked: Fields) -> None:
    methods = client.models.list().data[0].model_dump()["methods"]
    ways = [False, *[{"method": method} for method in methods]]
    texts = {
        client.chat.completions.create(**asked, extra_body={"speculative_config": way}).choices[0].message.content
        for way in ways
    }
    assert len(texts) == 1


def test_a_prediction_is_counted(client: openai.OpenAI, asked: Fields) -> None:
    asked = {**asked, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    again = client.chat.completions.create(**asked, prediction={"type": "content", "content": text or ""})
    assert again.choices[0].message.content == text
    assert again.usage
    assert again.usage.completion_tokens_details
    assert again.usage.completion_tokens_details.accepted_prediction_tokens


def test_tools(client: openai.OpenAI, asked: Fields, tool: Fields) -> None:
    del asked["max_tokens"]
    asked = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert json.loads(call.function.arguments)["sort"] in ("noun", "verb")
    with client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "noun"}
    more = {**asked, "messages": [*asked["messages"], choice.message, result], "tool_choice": "auto", "max_tokens": 8}
    assert client.chat.completions.create(**more).choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_errors_have_their_classes(client: openai.OpenAI, asked: Fields) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "another"})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, extra_body={"colour": "red"})
    assert (refused.value.param, refused.value.code) == ("colour", "unknown_parameter")


def test_leaving_a_stream_harms_no_later_request(client: openai.OpenAI, asked: Fields) -> None:
    expected = client.chat.completions.create(**asked).choices[0].message.content
    with client.chat.completions.create(**{**asked, "max_tokens": 200}, stream=True) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**asked).choices[0].message.content == expected
