"""SVIP's rule: a draft ends where the drafter's entropy is high (Zhang et al., arXiv 2411.18462)."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from redraft.errors import UsageError
from redraft.runtime.controllers.rules import LengthRule, up_to
from redraft.types import Tree

SCALE = 0.15
"""The factor of the entropy under the root, as in the authors' code."""
MOST = 10
"""Largest threshold. The entropy of a million tokens alike is 14 nats, and its root in the rule 1.4."""


@dataclass(frozen=True)
class Svip(LengthRule):
    """Drafts of at most `gamma` tokens that end after the first token with √(0.15 H(q)) > threshold.

    q is the distribution from which the drafter took the token. Its entropy H needs every probability, and a tree has
    only those of its nodes. So the rule takes the largest lower bound of H that follows from them: a token without
    node is no likelier than the least likely sibling with one, so that H(q) ≥ -Σ q_i ln q_i - (1 - Σ q_i) ln min q_i
    over the siblings. For a chain this is -ln q of its token, and the rule equals `confidence` with the threshold
    exp(-h² / 0.15), 0.55 for the authors' h = 0.3. With several children a node it is closer to the entropy.
    Siblings must be the likeliest tokens of their distribution.
    """

    gamma: int = 24
    threshold: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= MOST:
            raise UsageError(f"threshold must be from 0 to {MOST}, not {self.threshold}")

    @property
    def most_entropy(self) -> float:
        """The largest entropy, in nats, that does not end a draft."""
        return self.threshold**2 / SCALE

    @property
    def confidence(self) -> float:
        """The probability under which the entropy at a chain's token is too large. Siblings may make it smaller."""
        return exp(-self.most_entropy) if self.width == 1 else 0.0

    def stop(self, tree: Tree) -> Tree:
        """Return the draft up to the first tokens from a distribution of high entropy."""
        entropies = least_entropies(tree)
        return up_to(tree, [node > 0 and entropies[parent] > self.most_entropy
                            for node, parent in enumerate(tree.parents.tolist())])  # fmt: skip


def least_entropies(tree: Tree) -> list[float]:
    """Return a lower bound of the entropy, in nats, of the distribution after each node; 0 for a leaf."""
    log_probs, parents = tree.log_probs.tolist(), tree.parents.tolist()
    known, least, entropies = [0.0] * len(parents), [0.0] * len(parents), [0.0] * len(parents)
    for node in range(1, len(parents)):
        parent = parents[node]
        log_prob = log_probs[node] - log_probs[parent]
        known[parent] += exp(log_prob)
        least[parent] = min(least[parent], log_prob)
        entropies[parent] -= exp(log_prob) * log_prob
    rests = [max(1 - share, 0.0) for share in known]
    return [entropy - rest * log_prob for entropy, rest, log_prob in zip(entropies, rests, least, strict=True)]
