"""The protocol of samplers, and acceptance: a node is accepted if its token is its parent's target token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.sampling.truncation import TokenLogprobs, no_numbers
from redraft.runtime.trees.tree import accepted_path
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree


class Sampler(ABC):
    """Chooses the verifier's tokens for one request. It may record values of its tokens, and of some past the end."""

    logit_margins: list[float] | None = None
    logprobs: list[TokenLogprobs] | None = None
    device_temperature: float | None = None
    """The temperature if a device's own acceptance chooses the same tokens, 0 for greedy; None if it cannot.

    `verify` is then called for some tokens only.
    """

    @abstractmethod
    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Choose target tokens after the nodes of `tree`, and accept the nodes that agree with them.

        logits: float32[n, V], a row a node; read only, overwritten by the next step.
        tokens: all committed ones; the last is the root, and its next token has position len(tokens).
        A request's sampler is called for every one of its tokens, the first time with the prompt.
        """

    def resume(self, prompt: Sequence[int]) -> None:  # noqa: B027 (some have no state)
        """Take the prompt, for a request that is first called with more tokens. It has no values of these."""


@runtime_checkable
class OverTokens(Protocol):
    """A sampler that needs only the verifier's likeliest token after each node, not the logits."""

    def sample_likeliest(self, likeliest: Sequence[int], tree: Tree, tokens: Sequence[int]) -> Sequence[int]:
        """Return the target token after every node. The arguments are those of `Sampler.verify`."""


def at_token(number: int, error: UsageError) -> UsageError:
    """Return an error with the number of the token, from 1, at which it happened; its cause stays."""
    failure = UsageError(f"token {number}: {error.message}", error.hint)
    failure.__cause__ = error.__cause__ or error
    return failure


def accept(tree: Tree, target_token_ids: Sequence[int]) -> Outcome:
    """Accept the nodes whose tokens are their parents' target tokens. The bonus is the last one's target token."""
    path: tuple[int, ...] = ()
    if len(target_token_ids) > 1:
        path = accepted_path(tree.tokens.tolist(), tree.parents.tolist(), target_token_ids)
    tokens = (target_token_ids[0], *[target_token_ids[node] for node in path])
    return Outcome(target_token_ids, path, tokens[-1], tokens)


class Greedy(Sampler):
    """Chooses the likeliest token. If requested, `logit_margins` records its lead over the second largest logit.

    If the lead is tiny, kernels that round differently may choose another token.
    """

    def __init__(self, record_logit_margins: bool = False) -> None:
        self._prompt_length = 0
        self.logit_margins = [] if record_logit_margins else None
        self.device_temperature = 0.0 if type(self) is Greedy and not record_logit_margins else None

    def resume(self, prompt: Sequence[int]) -> None:
        self._prompt_length = len(prompt)

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Accept the nodes that are their parents' likeliest tokens, and record logit margins if requested.

        If an accepted row has NaN, which argmax finds first, the outcome has an error.
        """
        self._prompt_length = self._prompt_length or len(tokens)
        outcome = accept(tree, logits.argmax(axis=-1).tolist())
        for count, node in enumerate((0, *outcome.path)):
            if np.isnan(logits[node, outcome.tokens[count]]):
                number = len(tokens) - self._prompt_length + count + 1
                error = at_token(number, no_numbers())
                return outcome._replace(
                    path=outcome.path[:count], bonus=NOT_REACHED, tokens=outcome.tokens[:count], error=error
                )
        if self.logit_margins is not None:
            self.logit_margins.extend(top_two_margins(logits[[0, *outcome.path]]))
        return outcome


def top_two_margins(logits: FloatArray) -> list[float]:
    """Return the difference of each row's two largest logits in float32[n, V]; infinite for a vocabulary of one."""
    if logits.shape[-1] < 2:
        return [float("inf")] * len(logits)
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    logit_margins: list[float] = (top[:, 1] - top[:, 0]).tolist()
    return logit_margins
