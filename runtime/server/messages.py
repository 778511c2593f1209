"""Messages of OpenAI's chat API in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from redraft.errors import UsageError
from redraft.runtime.conversation import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = '{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template; values that it does not read stay as they are.

    - Content that is a list of parts becomes a text, with newlines between the parts. All parts must be of type `text`.
    - Arguments of tool calls become objects. An empty text means no arguments.
    - A tool's message gets the name of its call. An assistant without content gets an empty one.
    - The role `developer` becomes `system`, the name that templates know.

    Raises UsageError, which names the place, as `messages[1].content[0]`.
    """
    names: dict[str, str] = {}  # of the calls so far, by id
    found = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if not isinstance(message, Mapping):
            _refuse(place, "is an object", message)
        role = message.get("role")
        if role not in _ROLES:
            _refuse(f"{place}.role", f"is one of {', '.join(_ROLES)}", role)
        own = dict(message, role="system" if role == "developer" else role)
        calls = own.pop("tool_calls", None)
        if calls and role != "assistant":
            raise UsageError(f"{place}.tool_calls: only the role assistant calls tools, found {role!r}")
        own["content"] = _content(f"{place}.content", own.get("content"), role == "assistant")
        if calls:
            own["tool_calls"] = _calls(f"{place}.tool_calls", calls)
            names.update((call["id"], call["function"]["name"]) for call in own["tool_calls"])
        if role == "tool":
            own.setdefault("name", _called(f"{place}.tool_call_id", own.get("tool_call_id"), names))
        found.append(own)
    return found


def _content(place: str, content: Any, may_lack: bool) -> str:
    """Return the text of a message's content."""
    if content is None and may_lack:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        _refuse(place, "is a text or a list of parts", content)
    return "\n".join(_text(f"{place}[{number}]", part) for number, part in enumerate(content))


def _text(place: str, part: Any) -> str:
    """Return the text of one part of a content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        _refuse(place, 'is an object like {"type": "text", "text": "Hello"}', part)
    if kind != "text":
        raise UsageError(f"{place}: this server reads parts of type text only, found {kind!r}")
    if not isinstance(part.get("text"), str):
        _refuse(f"{place}.text", "is a text", part.get("text"))
    return str(part["text"])


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Return an assistant's tool calls with their arguments as objects."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        _refuse(place, "is a list of calls", calls)
    return [_call(f"{place}[{number}]", call) for number, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        _refuse(place, f"is an object like {_CALL}", call)
    if call.get("type", "function") != "function":
        raise UsageError(f"{place}.type: this server knows calls of type function only, found {call['type']!r}")
    if not isinstance(call.get("id"), str):
        _refuse(f"{place}.id", "is a text", call.get("id"))
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(f"{place}.function", "is an object with a name and arguments", function)
    arguments = call_arguments(f"{place}.function.arguments", function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def call_arguments(place: str, text: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object. Raises UsageError, which names the place, for another text."""
    if not isinstance(text, str):
        _refuse(place, "is a JSON object as a text", text)
    try:
        found = json.loads(text or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected a JSON object as a text, found other text ({error})") from None
    if not isinstance(found, dict):
        _refuse(place, "is a JSON object as a text", found)
    return dict(found)


def _called(place: str, call_id: Any, names: Mapping[str, str]) -> str:
    """Return the name of the tool that an earlier message called with this id."""
    if not isinstance(call_id, str) or call_id not in names:
        _refuse(place, "is the id of a tool call of an earlier message", call_id)
    return names[call_id]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _refuse(place: str, expected: str, found: Any) -> NoReturn:
    """Raise UsageError for a value of another form. expected: a sentence without its subject, as "is a text"."""
    missing = found is None
    raise UsageError(f"{place} {expected}, found {'nothing' if missing else repr(found)[:80]}")
