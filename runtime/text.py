"""Text in, tokens out and back: the tokenizer, the chat template, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from redraft import names
from redraft.errors import BundleError, UsageError

Message = Mapping[str, Any]

_CONTEXT_TOKENS = 6
_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """The half of a tokenizer that a stream needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; an unfinished character reads U+FFFD."""


class Text:
    """A bundle's tokenizer and chat template.

    bos, eos: ids, None where the model has none; they give `bos_token` and `eos_token` of the template.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None = None, bos: int | None = None, eos: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        self._eos = eos
        self._template = template

    @classmethod
    def load(cls, folder: Path, bos: int | None, eos: int | None) -> Text:
        """Read `tokenizer.json` and, where present, `chat_template.jinja`. Raises BundleError."""
        path = folder / names.TOKENIZER_FILE
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"{path}: expected a tokenizer, found {error}", "rebuild the bundle") from error
        template = folder / names.CHAT_TEMPLATE_FILE
        return cls(tokenizer, template.read_text(encoding="utf-8") if template.is_file() else None, bos, eos)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `special_tokens`, with those that the tokenizer itself puts around a text.

        An empty text is the bare beginning-of-sequence token. Raises UsageError where the tokenizer has none, and for a
        text that came of bytes which are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt is not UTF-8 (character {error.start})", "convert it first") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        if ids:
            return ids
        if self.bos is None:
            raise UsageError(
                "the prompt is empty and the tokenizer has no beginning-of-sequence token", "give a prompt"
            )
        return [self.bos]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation, special tokens written out: encode it with `special_tokens=False`.

        Raises UsageError where the bundle has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise UsageError("this model has no chat template", "give a plain prompt")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self._template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._word(self.bos),
                eos_token=self._word(self._eos),
            )
        except TemplateError as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from error

    def _word(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.id_to_token(token) or ""


def _refuse(message: str) -> None:
    raise TemplateError(message)


class TextStream:
    """The text that follows a prompt, token by token.

    Characters come out whole: bytes that do not yet make one are held back, and so is text that may turn out to begin
    a stop string. Tokens are decoded after a few of their predecessors, since decoders treat the start of a text
    differently.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decoder = decoder
        self._stops = tuple(stops)
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._known = decoder.decode(self._ids)
        self._fresh = len(self._ids)
        self._taken = 0

    def push(self, token: int) -> bool:
        """Add a token; true when the text now ends at a stop string, which is cut off."""
        self._ids.append(token)
        seen = self._decoder.decode(self._ids)
        if seen.endswith(_UNFINISHED) or len(seen) <= len(self._known):
            return False
        before = len(self.text)
        self.text += seen[len(self._known) :]
        del self._ids[: self._fresh]
        self._fresh = len(self._ids)
        self._known = self._decoder.decode(self._ids)
        return self._stop(before)

    def take(self, finished: bool = False) -> str:
        """Text not taken yet that no stop string can still cut; all of it once `finished`."""
        end = len(self.text) - (0 if finished or self.stopped else self._held())
        chunk = self.text[self._taken : end]
        self._taken = max(end, self._taken)
        return chunk

    def _stop(self, before: int) -> bool:
        """Cut the text at the earliest stop string that reaches past `before`."""
        found = [self.text.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stops]
        ends = [position for position in found if position >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.stopped = True
        return self.stopped

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0
