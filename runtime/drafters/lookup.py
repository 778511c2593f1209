"""Parts that all lookups share: drafters without engines that learn how often their candidates are correct."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from redraft.engines.bundle import Bundle
from redraft.methods import Method
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import OfferKey
from redraft.types import OfferKind

LEAST_PROBABILITY = 0.03
"""Least probability of a drafted node: no budget would verify a less likely one. Rates stay above it to recover."""
STARTING_RATES = (0.05, 0.15, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""Share of first candidates that are correct after a context of 0 … 16 tokens, before anything is learned."""
LEARNING_RATE = 1 / 32


def moved(rate: float, observed: float, weight: float = LEARNING_RATE) -> float:
    """Return a running mean, moved by `weight` towards an observation."""
    return max(rate + weight * (observed - rate), LEAST_PROBABILITY)


class LookupDrafter(Drafter):
    """A lookup with options. A subclass sets `method`."""

    method: ClassVar[Method[Any]]

    def __init__(self, verifier: Verifier, options: Any = None) -> None:
        super().__init__(verifier)
        self.name = self.method.id
        self.options = options or self.method.parse_options({})
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        return cls(verifier, cls.method.parse_options(options))


@dataclass(slots=True)
class GrowingDraft:
    """A tree in progress: tokens, parents, joint probabilities, and kinds of candidates, whose rates are learned."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    probs: list[float] = field(default_factory=lambda: [1.0])
    kinds: list[int] = field(default_factory=lambda: [-1])

    def add(self, token: int, parent: int, prob: float, kind: int) -> int:
        """Add a node, and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.kinds.append(kind)
        return len(self.tokens) - 1

    def compared(self, committed: abc.Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield every node whose parent is among the committed tokens, and true if it is correct."""
        depths = {0: 0}
        for node in range(1, len(self.tokens)):
            depth = depths.get(self.parents[node], len(committed))
            if depth < len(committed):
                is_correct = self.tokens[node] == committed[depth]
                if is_correct:
                    depths[node] = depth + 1
                yield node, is_correct

    def update(self, rates: list[float], committed: abc.Sequence[int]) -> None:
        """Learn the rates of kinds from the compared nodes."""
        for node, is_correct in self.compared(committed):
            kind = self.kinds[node]
            rates[kind] = moved(rates[kind], is_correct)
