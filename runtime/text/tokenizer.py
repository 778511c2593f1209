"""The tokenizer and chat template of a bundle, and text that grows token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from redraft import names
from redraft.errors import BundleError, UsageError
from redraft.runtime.conversation import Message
from redraft.runtime.text.chat import ChatTemplates

_CONTEXT_TOKENS = 6
_UNFINISHED = "\ufffd"


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, without the truncation and padding that training may have set.

    Raises BundleError if the file is missing or damaged.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise BundleError(f"{path}: expected a tokenizer, found {error}", "rebuild the bundle") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Tokenizer:
    """A bundle's tokenizer and chat templates.

    bos: id of the beginning-of-sequence token, None if the model has none.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chat: ChatTemplates | None = None, bos: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.bos = bos
        self._chat = chat or ChatTemplates({})

    @classmethod
    def load(cls, folder: Path, bos: int | None, eos: int | None) -> Tokenizer:
        """Read a bundle's tokenizer, chat templates and special tokens. Raises BundleError.

        Bundles without `special_tokens_map.json` get `bos_token` and `eos_token` from these ids.
        """
        tokenizer = load_tokenizer(folder / names.TOKENIZER_FILE)
        tokens = _special_tokens(folder / names.SPECIAL_TOKENS_FILE)
        if tokens is None:
            ids = {"bos_token": bos, "eos_token": eos}
            tokens = {name: tokenizer.id_to_token(i) or "" for name, i in ids.items() if i is not None}
        return cls(tokenizer, ChatTemplates.load(folder, tokens), bos)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str, special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Return the ids of `text`; with `special_tokens`, with those that the tokenizer itself puts around a text.

        name: the name of the text in errors.

        An empty text becomes the beginning-of-sequence token. Raises UsageError if the tokenizer has no such token, or
        if the text came from bytes that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the {name} is not UTF-8 (character {error.start})", "convert it first") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        if ids:
            return ids
        if self.bos is None:
            raise UsageError(
                "the prompt is empty and the tokenizer has no beginning-of-sequence token", "give a prompt"
            )
        return [self.bos]

    @cached_property
    def _added(self) -> Mapping[int, bool]:
        """The ids of tokens outside of the tokenizer's model, and whether they are special tokens."""
        return {i: token.special for i, token in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return frozenset(i for i, special in self._added.items() if special)

    def added_id(self, text: str) -> int | None:
        """Return the id of a text that is a token outside of the tokenizer's model, special or not; else None."""
        token: int | None = self.tokenizer.token_to_id(text)
        return token if token in self._added else None

    def special_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Return the ids of those texts that are special tokens, which decoding leaves out unless it keeps them."""
        ids = map(self.tokenizer.token_to_id, texts)
        return tuple(i for i in ids if i in self._special_ids)

    def decode(self, ids: Sequence[int], keep: AbstractSet[int] = frozenset()) -> str:
        """Return the text of `ids` without special tokens but those of `keep`; an unfinished character is U+FFFD."""
        kept = [i for i in ids if i in keep or i not in self._special_ids] if keep else list(ids)
        text: str = self.tokenizer.decode(kept, skip_special_tokens=not keep)
        return text

    def check_chat_template(self) -> None:
        """Raise UsageError if the model has no default chat template, or if it does not compile."""
        self._chat.check()

    def chat_template_source(self, tools: bool) -> str:
        """Return the Jinja text of the template for a conversation, with tools or without. Raises UsageError."""
        return self._chat.source(tools)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None, chat_template: str | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Return the prompt of a conversation with its special tokens as text: encode it with `special_tokens=False`.

        Arguments and errors are those of `ChatTemplates.render`.
        """
        return self._chat.render(messages, add_generation_prompt, tools, documents, chat_template, **variables)


def _special_tokens(path: Path) -> Mapping[str, str] | None:
    """Return the text of the special tokens by name, None without such a file."""
    if not path.is_file():
        return None
    try:
        return {str(name): str(token) for name, token in json.loads(path.read_bytes()).items()}
    except (ValueError, AttributeError) as error:
        raise BundleError(f"{path}: expected names of tokens, found {error}", "rebuild the bundle") from error


class Detokenizer:
    """The text after a prompt, token by token.

    It returns whole characters only. It holds back the bytes of an unfinished one, and text that may begin a stop
    string. The first `min_tokens` tokens complete no stop string. It leaves out special tokens but those of `keep`. It
    decodes tokens after a few of their predecessors, since decoders treat the start of a text differently.

    text:  the text so far.   stop: the stop string that ended it, None before.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (), min_tokens: int = 0,
        keep: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.text = ""
        self.stop: str | None = None
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._unstoppable = min_tokens
        self._keep = frozenset(keep)
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._known = tokenizer.decode(self._ids, self._keep)
        self._fresh = len(self._ids)
        self._taken = 0
        self._prefixes = [_StopPrefix(stop) for stop in self._stops]
        self._searched = 0

    def push(self, token: int) -> bool:
        """Add a token. Returns true if the text now ends at a stop string, which is cut off."""
        self._ids.append(token)
        self._unstoppable -= 1
        seen = self._tokenizer.decode(self._ids, self._keep)
        if seen.endswith(_UNFINISHED) or len(seen) <= len(self._known):
            return False
        before = len(self.text)
        self.text += seen[len(self._known) :]
        del self._ids[: self._fresh]
        self._fresh = len(self._ids)
        self._known = self._tokenizer.decode(self._ids, self._keep)
        return self._unstoppable < 0 and self._stop(before)

    def take(self, finished: bool = False) -> str:
        """Return new text that no stop string can still cut; all of it if `finished`."""
        end = len(self.text) - (0 if finished or self.stop is not None else self._held())
        chunk = self.text[self._taken : end]
        self._taken = max(end, self._taken)
        return chunk

    def _stop(self, before: int) -> bool:
        """Cut the text at the earliest stop string that ends after `before`."""
        found = [self.text.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stops]
        ends = [position for position in found if position >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self.stop = self._stops[found.index(min(ends))]
        return self.stop is not None

    def _held(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        fresh, self._searched = self.text[self._searched :], len(self.text)
        return max([prefix.push(fresh) for prefix in self._prefixes], default=0)


class _StopPrefix:
    """The longest end of a growing text that begins a stop string, and is shorter (Knuth, Morris and Pratt).

    The time of a text is linear in its length, whatever the stop string.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self._length = 0

    def push(self, text: str) -> int:
        """Add text. Returns the length of the end."""
        for character in text:
            self._length = _longer(self._stop, self._borders, self._length, character)
            if self._length == len(self._stop):
                self._length = self._borders[-1]
        return self._length


@lru_cache(maxsize=1024)
def _borders(stop: str) -> list[int]:
    """Return, for each beginning of a stop string, the length of its longest border: an end that also begins it."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_longer(stop, borders, borders[-1], character))
    return borders


def _longer(stop: str, borders: Sequence[int], length: int, character: str) -> int:
    """Return how much of a stop string a text ends with after one more character; `length` before it."""
    while length and stop[length] != character:
        length = borders[length - 1]
    return length + (stop[length] == character)
