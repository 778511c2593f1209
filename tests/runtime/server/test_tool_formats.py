"""A chat template tells how the model calls tools. Calls that it writes are read back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from redraft.runtime.server.messages import template_messages
from redraft.runtime.server.parts import AnswerParser, Content, Part, Reasoning, ToolArguments, ToolCall
from redraft.runtime.server.tool_formats import AnswerFormat, ToolFormat, answer_format
from redraft.runtime.text.chat import ChatTemplates
from tests.runtime.fakes import byte_text

HERMES = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' if not loop.last }}
{%- endfor %}"""
LLAMA = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = """\
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- message.content + '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
    {%- else %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_NAMES = """\
{%- for message in messages %}
    {{- '[INST]' + message.content + '[/INST]' if message.role == 'user' else message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
    {%- endfor %}
{%- endfor %}"""
QWEN3 = HERMES + "{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '<think>\\n' }}"
ARGUMENTS = {"place": 'Zürich "city" </tool_call>', "days": [1, 2.5, None], "deep": {"[TOOL_CALLS]": "}]"}}


def parsed(found: AnswerFormat, text: str) -> list[Part]:
    parser = AnswerParser(found)
    return parser.push(text) + parser.finish()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, ToolFormat.HERMES),
        (QWEN3, ToolFormat.HERMES),
        (LLAMA, ToolFormat.LLAMA),
        (r"""{{ "<|start_header_id|>" }} {{ "{\"name\": \"" + name + "\", \"parameters\": " }}""", ToolFormat.LLAMA),
        (MISTRAL, ToolFormat.MISTRAL),
        (MISTRAL_NAMES, ToolFormat.MISTRAL),
        ("{{ messages[0].content }}", None),
        ("{{ '<tool_call>\\n<function=' + name + '>' }}", None),
        ('<|im_start|>{{ tools }} "parameters"', None),
    ],
)
def test_a_template_shows_its_format(template: str, expected: ToolFormat | None) -> None:
    names_first = template is MISTRAL_NAMES
    assert answer_format(template, tools=True, reasoning=False) == AnswerFormat(expected, names_first=names_first)
    assert answer_format(template, tools=False, reasoning=False) == AnswerFormat()


@pytest.mark.parametrize("content", ["", "I will look."])
@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL, MISTRAL_NAMES])
def test_calls_that_a_template_writes_are_read_back(template: str, content: str) -> None:
    if template is LLAMA:
        content = ""  # its template writes calls without content, and one of them
    names = ["weather"] if template is LLAMA else ["weather", "time-zone_2"]
    calls = [
        {"id": f"call{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(ARGUMENTS)}}
        for n, name in enumerate(names)
    ]
    user = {"role": "user", "content": "Well?"}
    messages = template_messages([user, {"role": "assistant", "content": content, "tool_calls": calls}])
    templates = ChatTemplates({"default": template})
    text = templates.render(messages).removeprefix(templates.render(messages[:1]))
    text = text.removeprefix("<|im_end|>\n<|im_start|>assistant\n")
    text = text.removeprefix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    expected: list[Part] = [Content(content)] if content else []
    for index, name in enumerate(names):
        expected += [ToolCall(index, name), ToolArguments(index, json.dumps(ARGUMENTS, ensure_ascii=False))]
    assert parsed(answer_format(template, tools=True, reasoning=True), text) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, [Reasoning("well"), Content("Hi")]), ({"enable_thinking": False}, [Content("well\n</think>\n\nHi")])],
)
def test_the_prompt_tells_whether_reasoning_comes_first(variables: dict[str, Any], expected: list[Part]) -> None:
    found = answer_format(QWEN3, tools=True, reasoning=True)
    prompt = ChatTemplates({"default": QWEN3}).render([{"role": "user", "content": "Hi"}], **variables)
    assert parsed(found.after(prompt), "well\n</think>\n\nHi") == expected
    assert parsed(found, "<think>well\n</think>\n\nHi") == [Reasoning("well"), Content("Hi")]


def test_reasoning_stays_in_the_content_if_nobody_asks_for_it() -> None:
    found = answer_format(QWEN3, tools=True, reasoning=False).after("<think>\n")
    assert parsed(found, "well</think>") == [Content("well</think>")]


def test_special_tokens_among_the_markers_are_found() -> None:
    tokenizer = byte_text()
    tokenizer.tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"])
    tokenizer.tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    assert AnswerFormat(ToolFormat.MISTRAL, ("<think>", "</think>")).kept_tokens(tokenizer) == (258, 259)
    assert AnswerFormat(ToolFormat.LLAMA).kept_tokens(tokenizer) == (260,)
    assert AnswerFormat(ToolFormat.HERMES).kept_tokens(tokenizer) == ()
    assert AnswerFormat().kept_tokens(tokenizer) == ()
