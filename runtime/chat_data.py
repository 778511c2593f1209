"""The data of a conversation for a chat template: plain values, without methods that could do harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from redraft.errors import UsageError

Message = Mapping[str, Any]

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the most common one first."""
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__),
)  # fmt: skip
"""Base types of enumerations and of numpy's scalars. Converting to them removes the methods of subclasses."""
_FORM = 'give messages like {"role": "user", "content": "Hello"}'


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
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
