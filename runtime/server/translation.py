"""Requests of other APIs as chats: their messages, and errors with the names that the client knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from redraft.runtime.server.errors import ApiError
from redraft.runtime.server.fields import ChatRequest, GenerationRequest, Prediction, fields_of

_MESSAGE = re.compile(r"messages[.[](\d+)\]?")


class TranslatedRequest(GenerationRequest):
    """Fields that a request of another API shares with chats."""

    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Translation:
    """A chat that stands for a request of another API.

    values:   the fields of the chat besides its messages.   messages: its messages.
    """

    def __init__(self, asked: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """asked: the fields that are equal in both.   names: patterns of a chat's other fields, and their names there.

        The name of a message is its place.
        """
        self.values = dict(asked)
        self.messages: list[dict[str, Any]] = []
        self._places: list[str] = []
        self._names = names

    def add(self, place: str, message: dict[str, Any]) -> None:
        """Add a message. place: of it, or of its first part, in the request."""
        self.messages.append(message)
        self._places.append(place)

    def chat(self, allow_unknown: bool) -> ChatRequest:
        """Return the chat. Raises ApiError as `parse` does."""
        return fields_of(ChatRequest, {**self.values, "messages": self.messages}, allow_unknown)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Raise errors of the chat with the names of the request."""
        try:
            yield
        except ApiError as error:
            param = None if error.param is None else self._renamed(error.param)
            message = self._renamed(error.message)
            raise ApiError(error.status, message, param, error.code, error.retry_after) from error

    def _renamed(self, text: str) -> str:
        """Return a text that begins with the name of a field, with the name that the client knows."""
        if (found := _MESSAGE.match(text)) and int(found[1]) < len(self._places):
            return self._places[int(found[1])] + text[found.end() :]
        for pattern, name in self._names.items():
            renamed, count = re.subn(rf"^{pattern}(?![\w-])", name, text)
            if count:
                return renamed
        return text


def shared(asked: TranslatedRequest) -> dict[str, Any]:
    """Return the fields of a request that chats have too, without `stream`, which is the answer's."""
    return {name: getattr(asked, name) for name in TranslatedRequest.model_fields if name != "stream"}
