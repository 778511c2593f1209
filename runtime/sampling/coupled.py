"""Coupled sampling: the token after a position is the argmax of score + noise, with the position's own noise.

That is a draw from the softmax of the scores (Gumbel-max trick), and a function of the request's seed and the logits
alone. So the tokens are the same whatever was drafted, and a drafter that adds the same noise to its own logits often
drafts the very token. Papers on coupled or "Gumbel" speculative sampling: Daliri et al. 2025 (arXiv 2408.07978), §3.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from redraft.runtime.sampling.noise import HashArray, all_ids, gumbel, hashes, largest_hash, noise_of, row_key
from redraft.runtime.sampling.truncation import Support
from redraft.types import FloatArray

_NEAR = 6.0
"""Tokens with scores above minus this are compared first, the others only if their noise can make up for it."""
_FEW = 4096
"""For so many tokens, the noise of all is computed at once."""


class Choose(Protocol):
    """Chooses a token of a support."""

    def choose(self, support: Support, position: int) -> int:
        """Return the place in `support` of the token at this absolute position."""

    def perturbed(self, support: Support, position: int) -> FloatArray:
        """Return the scores of which `choose` returns the place of the largest, float32[n]."""


class Likeliest:
    """Chooses the likeliest token."""

    def choose(self, support: Support, position: int) -> int:
        """Return the place of the largest score, the first of equal ones."""
        return int(support.scores.argmax())

    def perturbed(self, support: Support, position: int) -> FloatArray:
        """Return the scores."""
        return support.scores


class Coupled:
    """Draws with the noise of a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def choose(self, support: Support, position: int) -> int:
        """Return the place of the largest score + noise, the first of equal ones."""
        scores = support.scores
        if len(scores) <= _FEW:
            return int(self.perturbed(support, position).argmax())
        found = hashes(row_key(self._seed, position), _ids(support))
        near = scores > -_NEAR
        best = (scores[near] + gumbel(found[near])).max()
        # All other scores are lower than the largest, 0, by _NEAR or more.
        places = np.flatnonzero(near | (found <= np.uint32(largest_hash(float(best) + _NEAR))))
        return int(places[(scores[places] + gumbel(found[places])).argmax()])

    def perturbed(self, support: Support, position: int) -> FloatArray:
        """Return score + noise."""
        return support.scores + noise_of(row_key(self._seed, position), _ids(support))


def _ids(support: Support) -> HashArray:
    return all_ids(len(support.scores)) if support.ids is None else support.ids.astype(np.uint32)
