"""The result of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redraft.errors import RedraftError, UsageError
from redraft.runtime.metrics import Metrics
from redraft.runtime.sampling.logprobs import TokenLogprobs
from redraft.runtime.sequence import FinishReason


@dataclass(frozen=True)
class Generation:
    """One finished request.

    token_ids:     the new tokens, with the end-of-sequence token if one ended them. `text` leaves special tokens out
                   and ends before a stop string and before an unfinished character.
    logit_margins: lead of each token's logit over the second largest, if the caller asked for it. Above temperature 0,
                   of its logit over temperature with noise.
    logprobs:      of each token, if the request asked for them (`redraft.runtime.sampling.logprobs`).
    error:         why the request failed after these tokens, with the finish reason `error`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    metrics: Metrics
    logit_margins: tuple[float, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: RedraftError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object. It has `logprobs` only if the request asked for them."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            **({} if self.logprobs is None else {"logprobs": [token.to_json() for token in self.logprobs]}),
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)},
            "metrics": self.metrics.to_json(),
        }


class RequestError(UsageError):
    """Some requests failed while they ran. `generations` has the results of all: the others ended normally."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        failed = [(number, one.error) for number, one in enumerate(generations, 1) if one.error is not None]
        number, error = failed[0]
        name = f"prompt {number}, " if len(generations) > 1 else ""
        others = f" (and {len(failed) - 1} more prompts failed)" if len(failed) > 1 else ""
        super().__init__(f"{name}{error.message}{others}", error.hint)
        self.generations = tuple(generations)
