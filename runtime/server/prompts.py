"""Prompts of requests: conversations by the model's chat template, texts to fill in, and their token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redraft.errors import UsageError
from redraft.runtime.server.errors import ApiError, refused, wrong
from redraft.runtime.server.fields import ChatMessage, Tool
from redraft.runtime.server.messages import template_messages
from redraft.runtime.text.tokenizer import Tokenizer

_OWN_VARIABLES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "chat_template"})
"""Parameters of `Tokenizer.apply_chat_template`."""
_MIDDLES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
)
"""Tokens before the text, before its suffix, and before the middle that the model writes."""


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None,
    variables: dict[str, Any] | None = None, add_generation_prompt: bool = True,
) -> str:  # fmt: skip
    """Return the text of a conversation by the model's chat template, special tokens included.

    variables: further values for the template.   Raises ApiError for a model without a template, for messages that it
    refuses, and for a variable that the server sets itself.
    """
    if taken := sorted(_OWN_VARIABLES & (variables or {}).keys()):
        raise refused(f"chat_template_kwargs.{taken[0]}")
    plain_tools = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    template_source(tokenizer, bool(plain_tools))
    try:
        found = template_messages([message.model_dump(exclude_none=True) for message in messages])
        return tokenizer.apply_chat_template(found, add_generation_prompt, plain_tools or None, **variables or {})
    except UsageError as error:
        raise wrong(error.message, "messages", "invalid_value") from None


def template_source(tokenizer: Tokenizer, tools: bool) -> str:
    """Return the text of the model's chat template. Raises ApiError for a model without one."""
    try:
        return tokenizer.chat_template_source(tools)
    except UsageError:
        raise wrong("this model has no chat template; use /v1/completions", "messages", "no_chat_template") from None


def fill_in_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the token ids after which a model writes what is between the two texts.

    Raises ApiError if the tokenizer has no tokens for that.
    """
    for names in _MIDDLES:
        found = [tokenizer.tokenizer.token_to_id(name) for name in names]
        ids = [token for token in found if token is not None]
        if len(ids) == len(names):
            before, after, middle = ids
            return [before, *_encode(tokenizer, prefix), after, *_encode(tokenizer, suffix), middle]
    raise refused("suffix", " of a model without fill-in-the-middle tokens")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special_tokens=False) if text else []


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[int], most: int, special_tokens: bool, param: str
) -> list[int]:
    """Return the token ids of a prompt. Raises ApiError if it has more than `most` tokens.

    special_tokens: False for a text that has its special tokens already.   param: the field it came from.
    """
    if isinstance(prompt, str):
        if len(prompt) > most * tokenizer.longest_token:
            raise _too_long(f"{len(prompt)} characters", most, param)
        prompt = tokenizer.encode(prompt, special_tokens)
    if len(prompt) > most:
        raise _too_long(f"{len(prompt)} tokens", most, param)
    return list(prompt)


def _too_long(length: str, most: int, param: str) -> ApiError:
    return wrong(f"the prompt has {length}, at most {most} tokens are allowed", param, "context_length_exceeded")
