"""How a model writes reasoning and tool calls, as the text of its chat template shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from redraft.runtime.text.tokenizer import Tokenizer


class ToolFormat(Enum):
    """A format of tool calls.

    HERMES:  `<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call, as Hermes and Qwen write it.
    LLAMA:   `{"name": …, "parameters": {…}}`, first in the answer or after `<|python_tag|>`. More calls follow a call
             directly or after a semicolon.
    MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call. The newer
             form may have `[CALL_ID]` and an id after the name, and leave `[ARGS]` out.

    opener:  the text that a call begins with.   markers: all texts of the format that may be special tokens.
    keys:    names of the member with the arguments.
    newline: True if the template puts a newline between content and a call.
    """

    HERMES = ("<tool_call>", ("<tool_call>", "</tool_call>"), ("arguments",), True)
    LLAMA = ("<|python_tag|>", ("<|python_tag|>",), ("parameters", "arguments"), False)
    MISTRAL = ("[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("arguments",), False)

    def __init__(self, opener: str, markers: tuple[str, ...], keys: tuple[str, ...], newline: bool) -> None:
        self.opener = opener
        self.markers = markers
        self.keys = keys
        self.newline = newline


_SECTIONS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Markers around reasoning. Mistral's models have the second ones."""


@dataclass(frozen=True)
class AnswerFormat:
    """The format of an answer, which is content alone by default.

    tools:        how it calls tools; None if it calls none, or if the template's format is not one of ours.
    reasoning:    markers around the reasoning with which an answer may begin; None if that stays content.
    in_reasoning: True if the prompt has the opening marker, so that the answer begins after it.
    names_first:  True if the name of a call is before its JSON, as in Mistral's newer form.
    """

    tools: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None
    in_reasoning: bool = False
    names_first: bool = False

    def after(self, prompt: str) -> AnswerFormat:
        """Return the format of the answer to a rendered prompt, which may end with the opening marker of reasoning."""
        return replace(self, in_reasoning=self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0]))

    def kept_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the format's markers that are special tokens. Text without special tokens lacks them."""
        markers = (*(self.tools.markers if self.tools else ()), *(self.reasoning or ()))
        return tokenizer.special_ids(markers)


def answer_format(template_source: str, tools: bool, reasoning: bool) -> AnswerFormat:
    """Return the format of answers to prompts of a chat template.

    template_source: its Jinja text.   tools: False if the request has none, so that calls are content.
    reasoning: False to leave reasoning in the content.

    The prompt decides whether an answer begins with reasoning: call `AnswerFormat.after` with it.
    """
    sections = [markers for markers in _SECTIONS if any(marker in template_source for marker in markers)]
    found = _tool_format(template_source) if tools else None
    return AnswerFormat(
        tools=found,
        reasoning=sections[0] if reasoning and sections else None,
        names_first=found is ToolFormat.MISTRAL and "[ARGS]" in template_source,
    )


def _tool_format(source: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in source:
        return ToolFormat.MISTRAL
    if "<tool_call>" in source:
        is_json = "<function=" not in source and "<arg_key>" not in source  # Qwen3-Coder and GLM write XML
        return ToolFormat.HERMES if is_json else None
    quoted = source.replace('\\"', '"')
    if all(text in quoted for text in ("<|start_header_id|>", '{"name": ', '"parameters": ')):
        return ToolFormat.LLAMA
    return None
