"""OpenAI's client with a server: `python examples/openai_client.py URL MODEL`, for example http://127.0.0.1:8000."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import BadRequestError, OpenAI

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def weather(city: str) -> str:
    """Return what the tool says."""
    return f"sunny in {city}"


def whole(client: OpenAI, model: str) -> None:
    """Print an answer, with the figures of its speculation."""
    answer = client.chat.completions.create(model=model, messages=[QUESTION], max_tokens=48)
    print("whole:", answer.choices[0].message.content)
    print("figures:", answer.usage.total_tokens, "tokens,", answer.redraft["tokens_per_step"], "a step")


def streamed(client: OpenAI, model: str) -> None:
    """Print an answer as it comes, once plainly and once with drafts from lookup alone. Both have the same text."""
    for config in (False, {"method": "ngram", "num_speculative_tokens": 4}):
        print(f"stream with {config}: ", end="")
        chunks = client.chat.completions.create(
            model=model, messages=[QUESTION], max_tokens=48, seed=1, stream=True,
            extra_body={"speculative_config": config},
        )  # fmt: skip
        for chunk in chunks:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
        print()


def with_tools(client: OpenAI, model: str) -> None:
    """Let the model call a tool, and print its answer to the result."""
    messages: list[Any] = [QUESTION]
    try:
        message = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER]).choices[0].message
    except BadRequestError as error:
        print("tools:", error.body["message"])
        return
    if message.tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            print("tools:", call.function.name, call.function.arguments, "->", result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        message = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER]).choices[0].message
    print("tools:", message.content)


def main(url: str, model: str, api_key: str = "none") -> None:
    """Run all three."""
    client = OpenAI(base_url=f"{url}/v1", api_key=api_key)
    whole(client, model)
    streamed(client, model)
    with_tools(client, model)


if __name__ == "__main__":
    main(*sys.argv[1:])
