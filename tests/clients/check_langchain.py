"""LangChain's ChatOpenAI and OpenAI: invoke, batch, stream, async, structured output and tools."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = [HumanMessage("What is a queue?")]


class Answer(BaseModel):
    """An answer that is short however bad the model is."""

    sort: Literal["data structure", "animal"]
    sure: bool


@pytest.fixture
def chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, max_tokens=24, temperature=0.8, seed=5, max_retries=0,
        stream_usage=True,
    )  # fmt: skip


def test_a_stream_has_the_text_and_usage_of_the_whole_answer(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    joined = AIMessageChunk("")
    for chunk in chunks:
        joined += chunk
    assert joined.content == whole.content
    assert whole.usage_metadata
    assert joined.usage_metadata
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_a_batch_and_async_requests_get_the_same_texts(chat: ChatOpenAI) -> None:
    async def ask() -> list[Any]:
        whole = await chat.ainvoke(QUESTION)
        streamed = "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)])
        return [whole.content, streamed]

    texts = [one.content for one in chat.batch([QUESTION] * 4)] + asyncio.run(ask())
    assert len(texts) == 6
    assert len(set(texts)) == 1


def test_completions(url: str, model: str) -> None:
    llm = OpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=8, temperature=0, max_retries=0)
    assert "".join(llm.stream("A queue is")) == llm.invoke("A queue is")


def test_structured_output(chat: ChatOpenAI) -> None:
    structured = chat.model_copy(update={"max_tokens": None}).with_structured_output(Answer, method="json_schema")
    assert isinstance(structured.invoke(QUESTION), Answer)


def test_tools(chat: ChatOpenAI, tool: dict[str, Any]) -> None:
    bound = chat.model_copy(update={"max_tokens": None}).bind_tools(
        [tool], tool_choice="required", parallel_tool_calls=False
    )
    answer = bound.invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    call = answer.tool_calls[0]
    assert call["args"]["sort"] in ("noun", "verb")
    more = [*QUESTION, answer, ToolMessage("noun", tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools([tool]).invoke(more), AIMessage)


def test_errors_have_their_classes(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        chat.model_copy(update={"model_name": "another"}).invoke(QUESTION)
