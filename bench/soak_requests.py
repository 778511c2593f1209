"""The requests of a soak: a fixed set of different ones, from a seed, and ways to send them that change no text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TOPICS = ("a queue", "the sea", "prime numbers", "a sorting function", "rain in May", "tea", "an empty list")
_ASKS = ("What is {}?", "Write about {}.", "def f(x):  # {}\n", "One, two, {},", "List three facts about {}:")
_SCHEMAS: Sequence[Fields] = (
    {"type": "object", "properties": {"kind": {"enum": ["big", "small"]}, "sure": {"type": "boolean"}},
     "required": ["kind", "sure"], "additionalProperties": False},
    {"enum": ["yes", "no", "perhaps"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{3,9}$"},
)  # fmt: skip
WRONG: Sequence[tuple[Fields, int]] = (
    ({"temperature": -1}, 400), ({"colour": "red"}, 400), ({"model": "another"}, 404), ({"max_tokens": 0}, 400),
    ({"stop": "a" * 300}, 400), ({"logit_bias": {"x": 1}}, 400), ({"prompt": []}, 400), ({"n": 0}, 400),
)  # fmt: skip
"""Fields that make a completion wrong, and the status that it then must get."""


@dataclass(frozen=True)
class Asked:
    """A request: the path, and fields that decide the text."""

    path: str
    fields: Fields


def requests_of(model: str, count: int, seed: int, most_tokens: int) -> list[Asked]:
    """Return so many requests: chats and completions, greedy and drawn, with and without a schema.

    most_tokens: new tokens of a choice at most.
    """
    draw = random.Random(seed)
    return [_request(draw, model, number, most_tokens) for number in range(count)]


def _request(draw: random.Random, model: str, number: int, most_tokens: int) -> Asked:
    text = draw.choice(_ASKS).format(draw.choice(_TOPICS)) * draw.choice((1, 1, 1, 4))
    fields: Fields = {"model": model, "max_tokens": draw.randint(1, most_tokens), "seed": number}
    if draw.random() < 0.6:
        fields |= {
            "temperature": draw.choice((0.3, 0.8, 1.2)),
            "top_p": draw.choice((1.0, 0.9)),
            "top_k": draw.choice((0, 40)),
        }
    else:
        fields["temperature"] = 0
    if draw.random() < 0.2:
        fields["n"] = draw.randint(2, 3)
    if draw.random() < 0.2:
        fields |= draw.choice(({"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"frequency_penalty": 1.0}))
    if draw.random() < 0.2:
        fields["stop"] = draw.choice((["\n"], ["the", "."], [" a"]))
    if draw.random() < 0.4:
        return Asked(COMPLETIONS, {**fields, "prompt": text, "logprobs": draw.choice((None, 2))})
    fields |= {"messages": [{"role": "user", "content": text}]}
    if draw.random() < 0.3:
        schema = {"name": "form", "schema": draw.choice(_SCHEMAS)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        fields.pop("stop", None)
    elif draw.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": 2}
    return Asked(CHAT, fields)


def varied(draw: random.Random, asked: Asked, methods: Sequence[str]) -> Fields:
    """Return the fields of a request with others that change no text: method, prediction, priority, cache, user."""
    way: Fields = {"priority": draw.randint(0, 2), "user": draw.choice("abc")}
    method = draw.choice([None, *methods])
    if method is None:
        way["speculative_config"] = False
    else:
        way["speculative_config"] = {"method": method}
        if draw.random() < 0.3:
            way["speculative_config"]["num_speculative_tokens"] = draw.randint(1, 12)
    if draw.random() < 0.5:
        way["cache_salt"] = draw.choice("xyz")
    if asked.path == CHAT and method not in (None, "none") and draw.random() < 0.2:
        way["prediction"] = {"type": "content", "content": asked.fields["messages"][0]["content"]}
    return {**asked.fields, **way}
