"""A request of Anthropic's Messages as a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from redraft.runtime.server.anthropic_fields import (
    AnthropicMessage,
    AnthropicTool,
    MessagesRequest,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)  # fmt: skip
from redraft.runtime.server.errors import refused, wrong
from redraft.runtime.server.tool_formats import answer_format
from redraft.runtime.server.translation import Translation, shared

_NAMES = {
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
"""Of the fields of a chat."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SWITCH = "enable_thinking"
"""The variable by which chat templates turn reasoning off."""


def chat_of_messages(asked: MessagesRequest, template: str) -> Translation:
    """Return the chat that a request stands for. Raises ApiError for fields that do not work together.

    template: the text of the model's chat template.
    """
    found = prompt_of_messages(asked, template)
    found.values = (
        shared(asked)
        | found.values
        | {
            "max_tokens": asked.max_tokens,
            "stop": asked.stop_sequences,
            "user": asked.metadata.user_id if asked.metadata else None,
        }
    )
    return found


def prompt_of_messages(asked: PromptFields, template: str) -> Translation:
    """Return a chat with the prompt of a request. Raises and takes the same as `chat_of_messages`."""
    found = Translation({"model": asked.model, "chat_template_kwargs": asked.chat_template_kwargs}, _NAMES)
    form = asked.output_config.format if asked.output_config else None
    if form is not None:
        found.values["response_format"] = {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_},
        }  # fmt: skip
    found.values["tools"] = [_tool(tool) for tool in asked.tools or ()] or None
    if asked.tool_choice is not None:
        found.values |= _tool_choice(asked)
    if asked.thinking is not None and asked.thinking.type == "disabled":
        found.values["chat_template_kwargs"] = _without_reasoning(asked.chat_template_kwargs, template)
    if asked.system is not None:
        found.add("system", {"role": "system", "content": _content(asked.system)})
    for number, message in enumerate(asked.messages):
        _add_message(found, f"messages.{number}", message)
    if found.messages[-1]["role"] == "assistant":
        raise refused(f"messages.{len(asked.messages) - 1}", ": the beginning of an answer, as the last message,")
    return found


def _add_message(found: Translation, place: str, message: AnthropicMessage) -> None:
    """Add a message. It continues the message before if that has the same role."""
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [TextBlock(type="text", text=blocks)]
    if not blocks:
        raise wrong(f"{place}.content is empty", f"{place}.content")
    for number, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and message.role == "user":
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            found.add(f"{place}.content.{number}", result)
        elif isinstance(block, TextBlock) and message.role != "assistant":
            part = {"type": "text", "text": block.text}
            last = found.messages[-1] if found.messages else {}
            if last.get("role") != message.role or isinstance(last["content"], str):
                found.add(place, {"role": message.role, "content": [part]})
            else:
                last["content"].append(part)
        elif isinstance(block, TextBlock | ThinkingBlock | ToolUseBlock) and message.role == "assistant":
            if not found.messages or found.messages[-1]["role"] != "assistant":
                found.add(place, {"role": "assistant"})
            _add_to(found.messages[-1], block)
        else:
            param = f"{place}.content.{number}.type"
            raise wrong(f"a message of the role {message.role} has no block of type {block.type}", param)


def _add_to(answer: dict[str, Any], block: TextBlock | ThinkingBlock | ToolUseBlock) -> None:
    """Add a block to the assistant's message of a chat."""
    if isinstance(block, TextBlock):
        answer["content"] = answer.get("content", "") + block.text
    elif isinstance(block, ThinkingBlock):
        answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
    else:
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        answer.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})


def _content(content: str | Sequence[TextBlock]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


def _result(block: ToolResultBlock) -> str | list[dict[str, str]]:
    """Return the text of a tool's result. Chat templates know no other sign of an error."""
    content = _content(block.content or "")
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict,
    }  # fmt: skip
    return {"type": "function", "function": function}


def _tool_choice(asked: PromptFields) -> dict[str, Any]:
    choice = asked.tool_choice
    assert choice is not None
    if (choice.type == "tool") != (choice.name is not None):
        raise wrong("a name goes with the type tool", "tool_choice.name")
    chosen = _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _without_reasoning(variables: dict[str, Any] | None, template: str) -> dict[str, Any] | None:
    """Return the template's variables with which the model does not reason. Raises ApiError if it always does."""
    if _SWITCH in template:
        return {**(variables or {}), _SWITCH: False}
    if answer_format(template, tools=False, reasoning=True).reasoning:
        raise refused("thinking.type", " disabled, for a model whose chat template cannot turn it off,")
    return variables
