"""Chats turn by turn: the prompts that the template renders, and refused messages."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from redraft.errors import UsageError
from redraft.runtime import Runtime
from redraft.runtime.conversation import Conversation

from .fakes import BOS, make_runtime

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
