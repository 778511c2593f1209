"""LiteLLM with its OpenAI provider: whole answers, streams, async, structured output, tools and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

Fields = dict[str, Any]


class Answer(BaseModel, extra="forbid"):
    """An answer that is short however bad the model is."""

    sort: Literal["data structure", "animal"]
    sure: bool


@pytest.fixture
def asked(url: str, model: str, messages: list[Fields]) -> Fields:
    return {
        "model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": messages,
        "max_tokens": 24, "temperature": 0.8, "seed": 5, "num_retries": 0,
    }  # fmt: skip


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def test_a_stream_has_the_text_of_the_whole_answer(asked: Fields) -> None:
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)
    assert whole.usage.completion_tokens <= 24
    built = litellm.stream_chunk_builder(chunks)
    assert text_of(built) == text_of(whole)


def test_async_requests_get_the_same_texts(asked: Fields) -> None:
    async def ask() -> list[str]:
        whole = await asyncio.gather(*[litellm.acompletion(**asked) for _ in range(4)])
        stream = await litellm.acompletion(**asked, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return [streamed, *map(text_of, whole)]

    assert asyncio.run(ask()) == [text_of(litellm.completion(**asked))] * 5


def test_completions(asked: Fields) -> None:
    fields = {name: value for name, value in asked.items() if name != "messages"}
    fields |= {"model": fields["model"].replace("openai/", "text-completion-openai/"), "prompt": "A queue is"}
    whole = litellm.text_completion(**fields)
    streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**fields, stream=True))
    assert streamed == whole.choices[0].text


def test_structured_output(asked: Fields) -> None:
    schema = {"name": "answer", "schema": Answer.model_json_schema(), "strict": True}
    del asked["max_tokens"]
    answer = litellm.completion(**asked, response_format={"type": "json_schema", "json_schema": schema})
    assert Answer.model_validate_json(text_of(answer))


def test_tools(asked: Fields, tool: Fields) -> None:
    del asked["max_tokens"]
    answer = litellm.completion(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert json.loads(call.function.arguments)["sort"] in ("noun", "verb")


def test_errors_have_their_classes(asked: Fields) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/another"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked, extra_body={"colour": "red"})
