"""A request of OpenAI's Responses as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redraft.runtime.server.errors import refused, wrong
from redraft.runtime.server.responses_fields import (
    AllowedTools,
    ChosenTool,
    ResponseCall,
    ResponseCallOutput,
    ResponseMessage,
    ResponsePart,
    ResponseReasoning,
    ResponsesRequest,
    ResponseTool,
)  # fmt: skip
from redraft.runtime.server.translation import Translation, shared

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.(?:function|allowed_tools)": "tool_choice",
}
"""Of the fields of a chat."""
_SYSTEM = ("system", "developer")
_SAME = ("stop", "top_logprobs", "user", "safety_identifier", "parallel_tool_calls")


def chat_of_response(asked: ResponsesRequest) -> Translation:
    """Return the chat that a request stands for. Raises ApiError for fields that do not work together."""
    if asked.stream_options is not None and not asked.stream:
        raise wrong("stream_options needs stream", "stream_options")
    if asked.top_logprobs and not asked.include:
        raise wrong("top_logprobs needs message.output_text.logprobs in include", "top_logprobs")
    if asked.include and asked.tools and asked.tool_choice != "none":
        raise refused("include", " message.output_text.logprobs with tools")
    found = Translation(shared(asked) | {name: getattr(asked, name) for name in _SAME}, _NAMES)
    found.values |= {
        "max_tokens": asked.max_output_tokens,
        "logprobs": bool(asked.include),
        "top_logprobs": asked.top_logprobs if asked.include else None,
        "response_format": _response_format(asked),
        "tools": [_tool(tool) for tool in asked.tools or ()] or None,
        "tool_choice": _tool_choice(asked),
    }
    if asked.instructions:
        found.add("instructions", {"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        found.add("input", {"role": "user", "content": asked.input})
        return found
    answer: dict[str, Any] | None = None  # the assistant's message to which items of the same answer belong
    for number, item in enumerate(asked.input):
        place = f"input.{number}"
        if isinstance(item, ResponseMessage) and item.role != "assistant":
            _add_message(found, place, item)
            answer = None
        elif isinstance(item, ResponseCallOutput):
            message = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            found.add(place, message)
            answer = None
        else:
            assert isinstance(item, ResponseMessage | ResponseCall | ResponseReasoning)
            if answer is None or _begins_another(answer, item):
                answer = {"role": "assistant"}
                found.add(place, answer)
            _add_to(answer, item)
    return found


def _add_message(found: Translation, place: str, item: ResponseMessage) -> None:
    """Add a message. Those of the system at the beginning are one, since many chat templates take no more."""
    first = found.messages[0] if len(found.messages) == 1 else {}
    if first.get("role") in _SYSTEM and item.role in _SYSTEM:
        first["content"] = [*_parts(first["content"]), *_parts(_content(item.content))]
    else:
        found.add(place, {"role": item.role, "content": _content(item.content)})


def _begins_another(answer: dict[str, Any], item: ResponseMessage | ResponseCall | ResponseReasoning) -> bool:
    """Return true if an item cannot belong to the same message: reasoning comes first, then one text, then calls."""
    return not isinstance(item, ResponseCall) and ("content" in answer or "tool_calls" in answer)


def _add_to(answer: dict[str, Any], item: ResponseMessage | ResponseCall | ResponseReasoning) -> None:
    """Add an item to the assistant's message of a chat."""
    if isinstance(item, ResponseCall):
        function = {"name": item.name, "arguments": item.arguments}
        answer.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ResponseMessage):
        text = item.content if isinstance(item.content, str) else "\n".join(part.text for part in item.content)
        answer["content"] = text
    elif item.content:
        text = "".join(part.text for part in item.content)
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _content(content: str | Sequence[ResponsePart]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]


def _parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _response_format(asked: ResponsesRequest) -> dict[str, Any] | None:
    form = asked.text.format if asked.text else None
    if form is None:
        return None
    schema = {"name": form.name, "description": form.description, "schema": form.schema_, "strict": form.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    # A name alone is of no use without the schema, and the chat refuses a schema of another type.
    return {"type": form.type, "json_schema": given if form.type == "json_schema" or given else None}


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": function}


def _tool_choice(asked: ResponsesRequest) -> str | dict[str, Any] | None:
    choice = asked.tool_choice
    if isinstance(choice, ChosenTool):
        return _named(choice)
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}
