"""The forms of an answer: what each API makes of the outputs of its requests."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from redraft.runtime.server.errors import ApiError
from redraft.runtime.submission import Written

Json = dict[str, Any]


class Event(NamedTuple):
    """An event of a stream. Those of chats and completions have no name."""

    data: Json | str
    name: str | None = None


class Rendering(Protocol):
    """The form of an answer. Its outputs are pushed, and it is read as events, or whole, never both.

    id: of the answer.
    """

    id: str

    def begin(self) -> list[Event]:
        """Return the events before the first output."""

    def push(self, number: int, written: Written) -> list[Event]:
        """Return the events of an output of the submission of this number."""

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of an answer that failed."""

    def end(self) -> list[Event]:
        """Return the events after the last output."""

    def whole(self) -> Json:
        """Return the answer, after its last output."""
