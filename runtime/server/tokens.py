"""Tokens as clients see them: texts, bytes and log probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from redraft.runtime.sampling.truncation import TokenLogprobs
from redraft.runtime.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """A token's text, and its bytes. The text of a part of a character is U+FFFD, and its bytes may be unknown."""

    text: str
    bytes: bytes | None


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> TokenText:
        """Return the text of one token inside a text. A special token has its name."""
        raw = self._tokenizer.tokenizer
        once = raw.decode([token], skip_special_tokens=False)
        text = raw.decode([token, token], skip_special_tokens=False)[len(once) :]  # decoders strip the first space
        if _UNFINISHED not in text:
            return TokenText(text, text.encode())
        name = raw.id_to_token(token) or ""
        if found := _BYTE.fullmatch(name):
            return TokenText(_UNFINISHED, bytes([int(found[1], 16)]))
        letters = _byte_letters()
        known = all(letter in letters for letter in name)
        return TokenText(text, bytes(letters[letter] for letter in name) if known else None)

    def chat(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return log probabilities in the form of chats."""
        return [
            {
                **self._named(one.token_id, one.logprob),
                "top_logprobs": [self._named(token, logprob) for token, logprob in one.top],
            }
            for one in tokens
        ]

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, found = self.of(token)
        return {"token": text, "logprob": logprob, "bytes": None if found is None else list(found)}

    def completion(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """Return log probabilities in the form of completions. offset: characters before the first token."""
        texts = [self.of(one.token_id).text for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{self.of(token).text: logprob for token, logprob in one.top} for one in tokens],
            "text_offset": offsets,
        }


@lru_cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of the byte-level alphabet. Printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + place): value for place, value in enumerate(others)}
