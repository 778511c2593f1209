"""Greedy decoding without processors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft.runtime.sampling.sampler import Sampler, accept, at_token
from redraft.runtime.sampling.truncation import no_numbers
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree


class Greedy(Sampler):
    """Chooses the likeliest token. If requested, `logit_margins` records its lead over the second largest logit.

    If the lead is tiny, kernels that round differently may choose another token.
    """

    def __init__(self, record_logit_margins: bool = False) -> None:
        self._prompt_length = 0
        self.logit_margins = [] if record_logit_margins else None
        self.device_temperature = 0.0 if type(self) is Greedy and not record_logit_margins else None

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
