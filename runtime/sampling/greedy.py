"""Greedy decoding without processors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft.runtime.sampling.sampler import Sampler, accept
from redraft.types import FloatArray, Outcome, Tree


class Greedy(Sampler):
    """Chooses the likeliest token. If requested, `logit_margins` records its lead over the second largest logit.

    If the lead is tiny, kernels that round differently may choose another token.
    """

    def __init__(self, record_logit_margins: bool = False) -> None:
        self.logit_margins = [] if record_logit_margins else None

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Accept the nodes that are their parents' likeliest tokens, and record logit margins if requested."""
        outcome = accept(tree, logits.argmax(axis=-1).tolist())
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
