"""Messages of OpenAI's API become those of chat templates, and errors name the place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from redraft.errors import UsageError
from redraft.runtime.server.messages import template_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [1.0, null]}'}}


def test_calls_get_objects_and_tools_their_names() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "Done.", "tool_calls": None},
        {"role": "user", "content": "", "name": "me"},
    ]
    given = copy.deepcopy(messages)
    found = template_messages(messages)
    assert messages == given
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\nthere"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"b": 1, "a": [1.0, None]}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "3"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "", "name": "me"},
    ]
    assert list(found[2]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


def test_an_empty_text_means_no_arguments() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": ""}}
    found = template_messages([{"role": "assistant", "tool_calls": [call]}])
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {}


def assistant(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Hi", "messages[0] is an object, found 'Hi'"),
        ({"content": "a"}, "messages[0].role is one of system, developer, user, assistant, tool, found nothing"),
        ({"role": "function", "content": "a"}, "messages[0].role is one of"),
        ({"role": "user"}, "messages[0].content is a text or a list of parts, found nothing"),
        ({"role": "user", "content": 1}, "messages[0].content is a text or a list of parts, found 1"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0] is an object like"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "messages[0].content[1]: this server reads parts of type text only, found 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text is a text, found nothing"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only the role assistant calls tools, found 'user'"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls is a list of calls, found 'f'"),
        (assistant("f"), "messages[0].tool_calls[0] is an object like"),
        (assistant({**CALL, "type": "custom"}), "tool_calls[0].type: this server knows calls of type function only"),
        (assistant({**CALL, "id": None}), "messages[0].tool_calls[0].id is a text, found nothing"),
        (assistant({**CALL, "function": {}}), "messages[0].tool_calls[0].function is an object with a name"),
        ({"role": "tool", "content": "a"}, "messages[0].tool_call_id is the id of a tool call of an earlier message"),
        ({"role": "tool", "content": "a", "tool_call_id": "c2"}, "found 'c2'"),
    ],
)
def test_other_forms_are_refused_by_name(message: Any, error: str) -> None:
    with pytest.raises(UsageError) as raised:
        template_messages([message])
    assert error in str(raised.value)


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": NaN}', "[" * 100_000, {}, None, "1"])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(UsageError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments") as raised:
        template_messages([assistant(call)])
    assert len(str(raised.value)) < 300
