"""A chat with a model: it turns messages into the token ids of the prompt for the next answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redraft.errors import UsageError

if TYPE_CHECKING:
    from redraft.runtime.api import Runtime
    from redraft.runtime.chat_data import Message


class ConversationTooLong(UsageError):
    """The context has no space for an answer to the messages of a chat."""


def check_system(system: str | None, chat: bool) -> None:
    """Raise UsageError for a system message without a chat."""
    if system is not None and not chat:
        raise UsageError("--system needs --chat: a prompt without a template has no messages", "add --chat")


class Conversation:
    """The messages of one chat, which the model's default chat template turns into prompts.

    system: the first message of the chat, with the role `system`. If it is None, the user's message is the first.
    Raises UsageError if the model has no default chat template, or if the template does not compile.
    """

    def __init__(self, runtime: Runtime, system: str | None = None) -> None:
        runtime.tokenizer.check_chat_template()
        self._runtime = runtime
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> list[int]:
        """Add a message of the user, and return the token ids of the prompt for the answer.

        Raises UsageError if the template refuses the messages, and ConversationTooLong; the chat is then as before.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        ids = self._runtime.tokenizer.encode(
            self._runtime.tokenizer.apply_chat_template(messages), special_tokens=False
        )
        if len(ids) >= self._runtime.max_model_len:
            raise ConversationTooLong(
                f"the conversation has {len(ids)} tokens and the context holds {self._runtime.max_model_len}, a new "
                "token included",
                "shorten its messages, or let answers have fewer new tokens",
            )
        found = self._runtime.encode(ids)
        self._messages = messages
        return found

    def answer(self, text: str) -> None:
        """Add a message of the assistant."""
        self._messages.append({"role": "assistant", "content": text})
