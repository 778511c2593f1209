"""Chats: templates render as transformers renders them, turns see all before them, and every failure is one line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from redraft.errors import BundleError, UsageError
from redraft.runtime import Runtime
from redraft.runtime.conversation import Conversation
from redraft.runtime.text.chat import ChatTemplates
from redraft.runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.fakes import BOS, byte_text, make_runtime

from .chat_cases import CASES, CHAT, Case

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def reference(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with this template."""
    words = {word: place for place, word in enumerate(["<s>", "</s>", "<pad>", "<unk>"])}
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>")), **TOKENS
    )
    found.chat_template = template
    return found


def by_transformers(template: str | dict[str, str], messages: Any = CHAT, **values: Any) -> str:
    values = {"add_generation_prompt": True, **values}
    return str(reference(template).apply_chat_template(messages, tokenize=False, **values))


def rendered(template: str | dict[str, str], messages: Any = CHAT, **values: Any) -> str:
    sources = {"default": template} if isinstance(template, str) else template
    return ChatTemplates(sources, TOKENS).render(messages, **values)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_templates_render_as_transformers_renders_them(case: Case) -> None:
    for add_generation_prompt in (True, False):
        values = {**case.values, "add_generation_prompt": add_generation_prompt}
        expected = by_transformers(case.template, case.messages, **values)
        assert rendered(case.template, case.messages, **values) == expected
        assert case.shows in expected, "the template no longer shows its feature"


class Role(StrEnum):
    USER = "user"


@dataclass
class Place:
    city: str
    degrees: float


ODD_VALUES = {
    "enumeration": Role.USER, "numpy": np.float32(1.5), "bool of numpy": np.bool_(False), "tuple": ("a", 1),
    "dataclass": Place("Rome", 21.0), "array": np.zeros(2), "none inside": {"a": None, "b": [None]}, "set": {1},
}  # fmt: skip


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_values_that_json_lacks_are_shown_as_transformers_shows_them(value: Any) -> None:
    messages = [{"role": "user", "content": value}]
    template = "{{ messages[0].content }}|{{ messages[0].content is string }}|{{ messages | tojson }}|{{ extra }}"
    assert rendered(template, messages, extra=value) == by_transformers(template, messages, extra=value)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_comes_under_each_usual_name_and_none_is_left_out(name: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": None, name: "hm"}]
    template = "{{ messages | tojson }}{{ messages[0].content is defined }}"
    assert rendered(template, messages) == by_transformers(template, messages)
    assert '"thinking": "hm"' in rendered(template, messages)
    assert messages[0]["content"] is None, "the caller's messages are not changed"


def test_tools_choose_their_own_template_and_a_name_chooses_any() -> None:
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{ documents[0].text }}"}
    assert rendered(templates) == by_transformers(templates) == "plain"
    tools = [{"name": "f"}]
    assert rendered(templates, tools=tools) == by_transformers(templates, tools=tools) == "1 tools"
    documents = [{"text": "once"}]
    assert rendered(templates, documents=documents, chat_template="rag") == "once"
    with pytest.raises(UsageError, match="no chat template 'other'; name one of these: default, rag, tool_use"):
        rendered(templates, chat_template="other")
    with pytest.raises(UsageError, match="no chat template 'default'; name one of these: rag"):
        rendered({"rag": "x"})


def test_templates_and_tokens_come_from_the_bundle(tmp_path: Path) -> None:
    byte_text().tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}")
    older = Tokenizer.load(tmp_path, 256, 257)
    assert older.apply_chat_template(CHAT) == "<s>", "bundles without the file know two tokens"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<b>", "pad_token": "<p>"}))
    text = Tokenizer.load(tmp_path, 256, 257)
    assert text.apply_chat_template(CHAT) == "<b><p>"
    assert text.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "1"
    (tmp_path / "special_tokens_map.json").write_text("[]")
    with pytest.raises(BundleError, match=r"special_tokens_map.json: expected names of tokens"):
        Tokenizer.load(tmp_path, 256, 257)


def test_truncation_and_padding_of_an_older_bundle_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_text().tokenizer
    expected = tokenizer.encode("a text of more than eight").ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        len(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a text of more than eight").ids)
        == 64
    )
    assert Tokenizer.load(tmp_path, None, None).encode("a text of more than eight") == expected


def test_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(BundleError, match="expected a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


REFUSED = {
    "raises": ("{{ raise_exception('roles must\nalternate') }}", "refuses these messages: roles must alternate"),
    "no syntax": ("a\n{% if %}", r"does not compile: Expected an expression.* \(line 2\); fix the template"),
    "unknown tag": ("{% frob %}", "does not compile: Encountered unknown tag 'frob'"),
    "unknown filter": ("{{ 1 | frob }}", "does not compile: TemplateAssertionError: No filter named 'frob'"),
    "break outside a loop": ("{% break %}", "does not compile: SyntaxError: 'break' outside loop"),
    "too deep to compile": ("{{ " + "(" * 5000 + " }}", "does not compile: RecursionError"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"fails on these messages \(RecursionError"),
    "type": ("{{ messages + 1 }}", r"fails on these messages \(TypeError: "),
    "undefined": ("{{ nothing.here }}", "refuses these messages: UndefinedError: 'nothing' is undefined"),
    "division": ("{{ 1 / 0 }}", r"fails on these messages \(ZeroDivisionError: division by zero\)"),
    "key": ("{{ {}.popitem() }}", "refuses these messages: SecurityError: "),
    "interpreter": ("{{ ''.__class__.__mro__ }}", "refuses these messages: SecurityError: .*unsafe"),
    "list of the caller": ("{{ messages.append(1) }}", "refuses these messages: SecurityError"),
    "hidden name": ("{% set n = namespace(_a=1) %}", "refuses these messages: SecurityError: .*underscore"),
    "hidden name later": (
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "refuses these messages: SecurityError: .*underscore",
    ),
    "range": ("{% for i in range(10**9) %}{% endfor %}", r"fails on these messages \(OverflowError"),
    "not JSON": ("{{ {1: messages.append} | tojson }}", "refuses|fails"),
}


@pytest.mark.parametrize(("template", "match"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_fails_is_refused_in_one_line(template: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as refused:
        rendered(template)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


itself: dict[str, Any] = {"role": "user"}
itself["content"] = itself


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"messages": []}, "the conversation has no messages"),
        ({"messages": "Hello"}, "expected a list of messages, found str"),
        ({"messages": {"role": "user"}}, "expected a list of messages, found dict"),
        ({"messages": ["Hello"]}, r"messages\[0\] must be an object, found str"),
        ({"messages": [CHAT]}, r"messages\[0\] must be an object, found list"),
        ({"messages": [itself]}, r"messages\[0\] contains itself"),
        ({"tools": ["f"]}, r"tools\[0\] must be an object, found str"),
        ({"documents": [{"text": "a"}, 3]}, r"documents\[1\] must be an object, found int"),
        ({"extra": itself}, r"variables\[0\] contains itself"),
    ],
    ids=str,
)  # fmt: skip
def test_input_of_another_form_is_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        rendered("{{ messages | length }}", **{"messages": CHAT, **values})


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


def asked(runtime: Runtime, ids: list[int]) -> str:
    """Return the prompt that the template rendered."""
    return runtime.tokenizer.decode(ids)


def test_every_turn_sees_all_messages_before_it() -> None:
    runtime = make_runtime(template=TEMPLATE)
    conversation = Conversation(runtime, "be kind")
    assert asked(runtime, conversation.ask("one")) == "s:be kind;u:one;"
    conversation.answer("two")
    assert asked(runtime, conversation.ask("three")) == "s:be kind;u:one;a:two;u:three;"
    assert asked(runtime, Conversation(runtime).ask("one")) == "u:one;", "the system message is optional"


def test_special_tokens_are_those_of_the_template() -> None:
    """A tokenizer that adds its own beginning of sequence would add it twice."""
    runtime = make_runtime(template="{{ bos_token }}{{ messages[0].content }}")
    runtime.tokenizer.tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert runtime.encode("a") == [BOS, 97]
    assert Conversation(runtime).ask("a") == [BOS, 97]


def test_a_chat_needs_a_default_template_that_compiles() -> None:
    with pytest.raises(UsageError, match="no chat template; give a plain prompt, without --chat"):
        Conversation(make_runtime())
    with pytest.raises(UsageError, match="does not compile"):
        Conversation(make_runtime(template="{% if %}"))


def test_a_chat_longer_than_the_context_is_refused() -> None:
    conversation = Conversation(make_runtime(max_model_len=22, template=TEMPLATE))
    conversation.ask("a" * 8)
    conversation.answer("b" * 4)
    with pytest.raises(UsageError, match="the conversation has 22 tokens and the context holds 22, a new token"):
        conversation.ask("c")
