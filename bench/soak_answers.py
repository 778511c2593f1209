"""The answers of a soak, whole or in events, and those that a server gives to each request alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redraft.bench.http_client import Client, Json
from redraft.bench.soak_requests import Asked


class Choices:
    """The choices of one answer, as text, tokens' log probabilities and reason of the end by index.

    build: the fingerprint of what answered without its digest, which depends on options that change no text; of the
           first choice, if there are several.
    """

    def __init__(self) -> None:
        self.build: str | None = None
        self._text: dict[int, str] = {}
        self._rest: dict[int, list[Any]] = {}

    def add(self, answer: Json) -> None:
        """Add a whole answer, or an event of one."""
        self.build = answer["system_fingerprint"].rpartition("-")[0]
        for choice in answer["choices"]:
            message: Json = choice.get("message") or choice.get("delta") or choice
            index = choice["index"]
            self._text[index] = self._text.get(index, "") + (message.get("text", message.get("content")) or "")
            rest = self._rest.setdefault(index, [None, []])
            rest[0] = choice["finish_reason"] or rest[0]
            rest[1] += _logprobs(choice.get("logprobs"))

    @property
    def all(self) -> dict[int, list[Any]]:
        """All of it, to compare."""
        return {index: [text, *self._rest[index]] for index, text in sorted(self._text.items())}

    def among(self, answers: Sequence[Choices]) -> bool:
        """Return true if this is one of the answers: that of its build. Each of several choices may have a build."""
        found = self.all
        if len(found) == 1:
            answers = [one for one in answers if one.build == self.build]
        return all(any(one.all.get(index) == choice for one in answers) for index, choice in found.items()) and any(
            one.all.keys() == found.keys() for one in answers
        )

    def begin(self, answers: Sequence[Choices]) -> bool:
        """Return true if each text begins that of one of the answers."""
        return all(
            any(one._text.get(index, "").startswith(text) for one in answers) for index, text in self._text.items()
        )


def _logprobs(found: Json | None) -> list[Any]:
    """Return the log probabilities of a choice, one for each token."""
    if not found:
        return []
    return (
        list(found["content"])
        if "content" in found
        else list(zip(found["tokens"], found["token_logprobs"], strict=True))
    )


def oracle(url: str, requests: Sequence[Asked]) -> list[Choices]:
    """Return the answer to each request alone, without speculation and without rows of earlier ones."""
    found = []
    with Client(url) as client:
        for number, asked in enumerate(requests):
            choices = Choices()
            fields = {**asked.fields, "speculative_config": False, "cache_salt": f"alone {number}"}
            choices.add(client.ask(asked.path, fields))
            found.append(choices)
    return found
