"""From the verifier's logits to the tokens of a step.

A sampler decides at every node of a tree which token the verifier itself would have said there, and thereby which
drafted nodes are kept. One sampler serves one request; its randomness is keyed by the request's seed and the
position of the token, so that any two implementations can be compared token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.params import SamplingParams
from redraft.runtime.tree import accepted_path
from redraft.types import FloatArray, Outcome, Tree


class Sampler(Protocol):
    """Judges one tree of one sequence."""

    def verify(self, logits: FloatArray, tree: Tree, position: int) -> Outcome:
        """What the verifier says of `tree`.

        logits:   float32[n, V], a row a node; read only, overwritten by the next step.
        position: absolute position of the root, whose next token sits at position + 1.
        """


@runtime_checkable
class OverTokens(Protocol):
    """A sampler that needs only the verifier's likeliest token at each node, not the logits."""

    def accept(self, target_token_ids: Sequence[int], tree: Tree, position: int) -> Outcome:
        """As `Sampler.verify`."""


class Greedy:
    """The likeliest token everywhere. `logit_margins`, where wanted, records the lead of each over the runner-up.

    A plain and a speculative run multiply matrices of different heights, whose roundings differ: where the gap is
    tiny (a near-tie) their tokens may differ, and the record tells.
    """

    def __init__(self, record_logit_margins: bool = False) -> None:
        self.logit_margins: list[float] | None = [] if record_logit_margins else None

    def verify(self, logits: FloatArray, tree: Tree, position: int) -> Outcome:
        """See `Sampler.verify`."""
        said = logits.argmax(axis=-1).tolist()
        path = accepted_path(tree.tokens.tolist(), tree.parents.tolist(), said) if len(said) > 1 else ()
        tokens = tuple([said[0], *[said[node] for node in path]])
        if self.logit_margins is not None:
            self.logit_margins.extend(top_two_margins(logits[[0, *path]]))
        return Outcome(said, path, tokens[-1], tokens)


def top_two_margins(logits: FloatArray) -> list[float]:
    """Difference of the two largest logits of each row of float32[n, V]; infinite for a vocabulary of one."""
    if logits.shape[-1] < 2:
        return [float("inf")] * len(logits)
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    logit_margins: list[float] = (top[:, 1] - top[:, 0]).tolist()
    return logit_margins


def make_sampler(params: SamplingParams, record_logit_margins: bool = False) -> Greedy:
    """The sampler that `params` asks for. Raises UsageError for a temperature above 0."""
    if params.temperature > 0:
        raise UsageError(
            f"temperature {params.temperature} asked for, only greedy decoding is available", "use temperature 0"
        )
    return Greedy(record_logit_margins)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on its arguments alone: splitmix64's finaliser over their combination."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
