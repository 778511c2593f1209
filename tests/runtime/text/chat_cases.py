"""Small chat templates with the features that our environment adds to Jinja or sets, as public templates use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": ' Hé <b>&"quotes"</b> 日本 🙂 '},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHi!"},
    {"role": "user", "content": "And now?"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the <weather> of a città",
            "parameters": {"type": "object", "required": ["place"], "properties": {
                "place": {"type": "string", "description": "where"}, "days": {"type": ["integer", "null"]}}},
        },
    }
]  # fmt: skip
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": {
        "name": "weather", "arguments": {"place": "Zürich", "n": 1}}}]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "weather", "content": {"sun": True, "wind": None}},
]  # fmt: skip
PARTS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}, {"type": "text", "text": "!"}],
    }
]


@dataclass(frozen=True)
class Case:
    """A template, its input, and a text that the rendered prompt must contain."""

    name: str
    template: str
    shows: str
    messages: Sequence[Mapping[str, Any]] = field(default_factory=lambda: CHAT)
    values: Mapping[str, Any] = field(default_factory=dict)


CASES = [
    Case("llama 3.1: tools, a date given or today's", """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for m in messages %}{{- '<|h|>' + m.role + '<|/h|>' + m.content | trim + '<|e|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>' }}{%- endif %}""",
         '"description": "Tells the <weather> of a città"', values={"tools": TOOLS}),
    Case("mixtral: tool calls and results as JSON", """\
{%- set user = messages | selectattr("role", "equalto", "user") | list %}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {{- "[CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if call.id | length != 9 %}{{- raise_exception("ids have nine letters") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- "," if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif m.role == "tool" %}{{- '[RESULT] ' ~ m.content ~ (m.content | tojson) }}
    {%- elif m == user[-1] %}{{- "[TOOLS] " ~ tools | tojson ~ m.content }}
    {%- endif %}
{%- endfor %}""", '"arguments": {"place": "Zürich", "n": 1}', CALLS, {"tools": TOOLS}),
    Case("gemma: roles renamed, blocks that trim their lines", """\
{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'assistant' %}
{% set role = 'model' %}
{% else %}
{% set role = m['role'] %}
{% endif %}
{{ '<turn>' + role + '
' + m['content'] | trim + '</turn>
' }}{% endfor %}
{% if add_generation_prompt %}{{'<turn>model
'}}{% endif %}""", "<turn>model\n"),
    Case("qwen 3: thinking cut off by splits, messages from the end", """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last < 0 and m.role == "user" and m.content is string
           and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- thought if loop.index0 > ns.last else '' }}
    {%- endif %}
    {{- content ~ '|' }}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>' }}
{%- endif %}{{- ns.last }}""", "|Hi!|", values={"enable_thinking": False}),
    Case("generation blocks: text of the assistant, local variables", """\
{%- set x = 'out' %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{% set x = 'in' %}{{ loop.index ~ m.content ~ x }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<' ~ m.role ~ '>' }}
    {%- endif %}
{%- endfor %}{{ x }}""", "Hi!in</s><user>out"),
    Case("break and continue", """\
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}
{{ m.content }}{% endfor %}""", "Hé"),
    Case("content in parts, recursive loops", """\
{%- for m in messages %}{%- if m.content is string %}{{ m.content }}{%- else %}
{%- for part in m.content %}{{ '<image>' if part.type == 'image' else part['text'] }}{%- endfor %}
{%- endif %}{%- endfor %}
{%- for node in tree recursive %}({{ node.name }}{{ loop(node.children) if node.children }}){%- endfor %}""",
         "<image>What is it?!(a(b)(c))", PARTS,
         {"tree": [{"name": "a", "children": [{"name": "b"}, {"name": "c"}]}]}),
    Case("JSON with each option, dict and its keys", """\
{{- tools | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true) }}
{{- {'a': 'é'} | tojson(ensure_ascii=true) }}{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}
{{- dict(a=1, b=none) | tojson }}{{ dict.fromkeys(['x'], 2) }}{{ [1.5, true, none, 'x"'] | tojson }}
{{- tools | string | length }}""", '{"a": "\\u00e9"}{"a":[1,2]}', values={"tools": TOOLS}),
]  # fmt: skip
