"""Prompt lookup: it drafts the continuation of the latest tokens' last occurrences, in the prompt or the new text.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree. A node's probability depends
on the length of its context and on its rank among its siblings. The drafter learns while decoding how often nodes of
each kind are correct, so that trees can be pruned by joint probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Self

from redraft.engines.bundle import Bundle
from redraft.methods import NGRAM, find_method
from redraft.methods.unbuilt import LONGEST_MATCH, NgramOptions
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.learning import LEAST_PROBABILITY, STARTING_RATES, moved
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree, prune
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, OfferKind, Outcome, Tree

MOST_BRANCHES = 4
"""Most continuations in one tree."""
RANKS = 3
"""Ranks with rates of their own. Later siblings share the last rank."""
_OCCURRENCES = 8
"""Most occurrences of a context that are compared, the latest first."""

_LATER_SIBLING = (1.0, 0.3, 0.12)
"""Starting rates of siblings by rank, relative to the first."""
_LEARNING_RATE = 1 / 32


@dataclass(slots=True)
class Draft:
    """Continuations that share only the root: tokens, parents, joint probabilities and kinds by node.

    `first` maps a continuation's first token to its node. The continuation's other nodes follow it directly.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    kinds: list[int]
    first: dict[int, int]


class NgramIndex:
    """Index of the continuations of every context of the configured lengths in one request.

    `rates[kind]` is the recent share of correct nodes of that kind, kind = context length × RANKS + rank.
    """

    def __init__(self, tokens: list[int], config: NgramOptions, rates: list[float]) -> None:
        self._rates = rates
        self.draft: Draft | None = None
        self._tokens = tokens
        self._orders = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._places: dict[int, defaultdict[tuple[int, ...], list[int]]] = {o: defaultdict(list) for o in self._orders}
        self._indexed = 1
        self.extend()

    def extend(self) -> None:
        """Index the tokens committed since the last call, in constant time for each."""
        tokens, longest = self._tokens, self._orders.start
        for place in range(self._indexed, len(tokens)):
            before = tuple(tokens[max(place - longest, 0) : place])
            for order, table in self._places.items():
                if order <= place:
                    table[before[-order:]].append(place)
        self._indexed = len(tokens)

    def grow(self, budget: Budget) -> Draft:
        """Draft up to `width` continuations with different first tokens, the longest context and the latest first."""
        tokens = self._tokens
        draft = Draft([tokens[-1]], [-1], [1.0], [-1], {})
        latest = tuple(tokens[-self._orders.start :])
        for order in self._orders:
            places = self._places[order].get(latest[-order:])
            if places is None:
                continue
            for place in places[: -1 - _OCCURRENCES : -1]:
                if tokens[place] not in draft.first:
                    length = order if order < self._orders.start else self._match(place, order)
                    if not self._append(draft, place, length, budget.depth):
                        break
                    if len(draft.first) == min(budget.width, MOST_BRANCHES):
                        return draft
        return draft

    def _match(self, place: int, length: int) -> int:
        """Return how many tokens before `place` agree with the latest ones. `length` of them are known to agree."""
        tokens = self._tokens
        end = len(tokens)
        while length < LONGEST_MATCH and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _append(self, draft: Draft, place: int, length: int, depth: int) -> bool:
        """Add the tokens from `place` on while they are likely enough. At the text's end, the continuation repeats.

        Returns false if it adds no token.
        """
        tokens, rates = self._tokens, self._rates
        period = len(tokens) - place
        parent, prob = 0, 1.0
        kind = length * RANKS + min(len(draft.first), RANKS - 1)
        for step in range(depth):
            prob *= rates[kind]
            if prob < LEAST_PROBABILITY:
                return step > 0
            draft.tokens.append(tokens[place + step % period])
            draft.parents.append(parent)
            draft.probs.append(prob)
            draft.kinds.append(kind)
            parent = len(draft.tokens) - 1
            if step == 0:
                draft.first[tokens[place]] = parent
            kind = min(length + step + 1, LONGEST_MATCH) * RANKS
        return True


class NgramDrafter(Drafter):
    """Drafts by prompt lookup. Rates that one request has learned serve the next."""

    def __init__(self, verifier: Verifier, config: NgramOptions | None = None) -> None:
        super().__init__(verifier)
        self._config = config or NgramOptions()
        self.name = NGRAM
        self._key = OfferKey(self.name, OfferKind.LOOKUP)
        self._rates = [first * later for first in STARTING_RATES for later in _LATER_SIBLING]

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the drafter with options as `NgramOptions`. Raises UsageError."""
        return cls(verifier, find_method(NGRAM).parse_options(options))

    def begin(self, seq: Sequence) -> None:
        """Create the index of the request."""
        seq.drafting[self] = NgramIndex(seq.tokens, self._config, self._rates)

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return the looked-up tree, if the lookup found one."""
        index: NgramIndex = seq.drafting[self]
        index.extend()
        draft = index.grow(budget)
        if len(draft.tokens) == 1:
            return ()
        index.draft = draft
        return (Offer(self._key, prune(make_tree(draft.tokens, draft.parents, draft.probs), budget.nodes)),)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft: continuations of the decoded path are correct or wrong, verified or not."""
        index: NgramIndex = seq.drafting[self]
        draft, index.draft = index.draft, None
        if draft is None:
            return
        node = draft.first.get(outcome.tokens[0])
        for child in draft.first.values():
            self._learn(draft.kinds[child], child == node)
        if node is None:
            return
        for token in outcome.tokens[1:]:
            if node + 1 == len(draft.tokens) or draft.parents[node + 1] != node:
                return
            node += 1
            self._learn(draft.kinds[node], draft.tokens[node] == token)
            if draft.tokens[node] != token:
                return

    def _learn(self, kind: int, came_true: bool) -> None:
        self._rates[kind] = moved(self._rates[kind], came_true, _LEARNING_RATE)


DRAFTER = NgramDrafter
