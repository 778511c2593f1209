"""The token ids of prompts and predicted outputs, with every check of what a caller gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

from redraft.errors import UsageError
from redraft.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids that are used unchanged."""


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes the texts of requests, and refuses those that a model's vocabulary or context cannot hold."""

    tokenizer: Tokenizer
    vocabulary: int
    max_model_len: int

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises UsageError as `Runtime.encode`."""
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = _ids(prompt) or self.tokenizer.encode("")
        self._check_vocabulary(ids, "prompt")
        if len(ids) >= self.max_model_len:
            raise UsageError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_model_len}, a new token included",
                "shorten the prompt",
            )
        return ids

    def encode_prediction(self, prediction: Prompt) -> list[int]:
        """Return the token ids of a predicted output, without a BOS token. Raises UsageError."""
        if isinstance(prediction, str):
            self._check_length(prediction, "prediction")
            ids = self.tokenizer.encode(prediction, False, "prediction") if prediction else []
        else:
            ids = list(prediction)
        if ids:
            self._check_vocabulary(ids, "prediction")
        if len(ids) > self.max_model_len:
            raise UsageError(
                f"the prediction has {len(ids)} tokens and the context holds {self.max_model_len}",
                "shorten the prediction",
            )
        return ids

    def _check_length(self, text: str, name: str) -> None:
        """Raise UsageError, before encoding, for a text that is too long for the context with any tokens."""
        if len(text) > self.max_model_len * self.tokenizer.longest_token:
            raise UsageError(
                f"the {name} has {len(text)} characters and the context holds {self.max_model_len} tokens",
                f"shorten the {name}",
            )

    def _check_vocabulary(self, ids: Sequence[int], name: str) -> None:
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise UsageError(
                f"the {name} has token ids from {min(ids)} to {max(ids)}, the model knows 0 to {self.vocabulary - 1}",
                "use the tokenizer that belongs to the model",
            )


def _ids(prompt: Sequence[int]) -> list[int]:
    """Return the token ids. Raises UsageError for any other value."""
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [index(token) for token in prompt]
    except TypeError:
        raise UsageError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}") from None
