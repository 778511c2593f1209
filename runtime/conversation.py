"""The messages of a chat: plain values for a chat template, and the prompt for the next answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.runtime.api import Runtime


Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the most common one first."""
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__),
)  # fmt: skip
"""Base types of enumerations and of numpy's scalars. Converting to them removes the methods of subclasses."""
_FORM = 'give messages like {"role": "user", "content": "Hello"}'


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return plain messages for a template: without fields that are None, and with reasoning under all its usual names.

    Raises UsageError for an empty conversation and for messages of another form.
    """
    found = plain_objects("messages", messages)
    if not found:
        raise UsageError("the conversation has no messages", _FORM)
    return [_with_reasoning({key: value for key, value in message.items() if value is not None}) for message in found]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the two names that templates read."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def plain_objects(name: str, values: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a list of plain objects. Raises UsageError for the first value that is no object."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise UsageError(f"expected a list of {name}, found {type(values).__name__}", _FORM)
    found = []
    for place, value in enumerate(values):
        try:
            found.append(plain(value))
        except RecursionError as error:
            raise UsageError(f"{name}[{place}] contains itself or is nested too deeply", _FORM) from error
        if not isinstance(found[-1], dict):
            raise UsageError(f"{name}[{place}] must be an object, found {type(value).__name__}", _FORM)
    return found


def plain(value: Any) -> Any:
    """Return `value` made of JSON's types. Other objects, such as images, become a text with their type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(plain, value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        return plain(value.item())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


class ConversationTooLong(UsageError):
    """The context has no space for an answer to the messages of a chat."""


def check_system(system: str | None, chat: bool) -> None:
    """Raise UsageError for a system message without a chat."""
    if system is not None and not chat:
        raise UsageError("--system needs --chat: a prompt without a template has no messages", "add --chat")


class Conversation:
    """The messages of one chat, which the model's default chat template turns into prompts.

    system: the first message of the chat, with the role `system`. If it is None, the user's message is the first.
    Raises UsageError if the model has no default chat template, or if the template does not compile.
    """

    def __init__(self, runtime: Runtime, system: str | None = None) -> None:
        runtime.tokenizer.check_chat_template()
        self._runtime = runtime
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Add a message of the user, and return the token ids of the prompt for the answer.

        Raises UsageError if the template refuses the messages, and ConversationTooLong; the chat is then as before.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        ids = self._runtime.tokenizer.encode(
            self._runtime.tokenizer.apply_chat_template(messages), special_tokens=False
        )
        if len(ids) >= self._runtime.max_model_len:
            raise ConversationTooLong(
                f"the conversation has {len(ids)} tokens and the context holds {self._runtime.max_model_len}, a new "
                "token included",
                "shorten its messages, or let answers have fewer new tokens",
            )
        found = self._runtime.encode(ids)
        self._messages = messages
        return found

    def answer(self, text: str) -> None:
        """Add a message of the assistant."""
        self._messages.append({"role": "assistant", "content": text})
