"""Instructor: objects by JSON schema, by JSON with its own validation, partly streamed, and by tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel


class Answer(BaseModel, extra="forbid"):
    """An answer that is short however bad the model is."""

    sort: Literal["noun", "verb"]
    sure: bool


@pytest.fixture
def plain(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def asked(model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    # Small models repeat spaces between JSON tokens, and instructor's prompt may fill most of a small context.
    return {"model": model, "messages": messages, "temperature": 0, "frequency_penalty": 2, "max_retries": 0}


def test_an_object_by_its_schema(plain: openai.OpenAI, asked: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    answer, raw = client.chat.completions.create_with_completion(**asked, response_model=Answer)
    assert isinstance(answer, Answer)
    assert raw.usage.completion_tokens


def test_an_object_as_it_comes(plain: openai.OpenAI, asked: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(**asked, response_model=Answer)
    whole = client.chat.completions.create(**asked, response_model=Answer)
    assert (last.sort, last.sure) == (whole.sort, whole.sure)


def test_async_objects(url: str, asked: dict[str, Any]) -> None:
    async def ask() -> list[Answer]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
            jobs = [client.chat.completions.create(**asked, response_model=Answer) for _ in range(4)]
            return await asyncio.gather(*jobs)

    answers = asyncio.run(ask())
    assert len(answers) == 4
    assert all(one.model_dump() == answers[0].model_dump() for one in answers)  # they keep their raw answers


def test_an_object_by_a_tool(plain: openai.OpenAI, asked: dict[str, Any], tool: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(**asked, parallel_tool_calls=False, response_model=Answer), Answer)
