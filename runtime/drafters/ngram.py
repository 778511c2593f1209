"""Prompt lookup: it drafts the continuation of the latest tokens' last occurrences, in the prompt or the new text.

Saxena, "Prompt Lookup Decoding" (2023), with several continuations merged into a tree. A node's probability depends
on the length of its context and on its rank among its siblings. The drafter learns while decoding how often nodes of
each kind are correct, so that trees can be pruned by joint probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from redraft.methods import NGRAM, find_method
from redraft.methods.unbuilt import LONGEST_MATCH, NgramOptions
from redraft.runtime.drafters.lookup import LEAST_PROBABILITY, STARTING_RATES, GrowingDraft, LookupDrafter
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Offer
from redraft.runtime.trees.tree import make_tree, prune
from redraft.types import Budget, Outcome, Tree

MOST_BRANCHES = 4
"""Most continuations in one tree."""
RANKS = 3
"""Ranks with rates of their own. Later siblings share the last rank."""
_OCCURRENCES = 8
"""Most occurrences of a context that are compared, the latest first."""

_LATER_SIBLING = (1.0, 0.3, 0.12)
"""Starting rates of siblings by rank, relative to the first."""


@dataclass(slots=True)
class NgramDraft(GrowingDraft):
    """Continuations that share only the root. `first` has the first token of each."""

    first: set[int] = field(default_factory=set)


class NgramIndex:
    """Index of the continuations of every context of the configured lengths in one request.

    `rates[kind]` is the recent share of correct nodes of that kind, kind = context length × RANKS + rank.
    """

    def __init__(self, tokens: list[int], options: NgramOptions, rates: list[float]) -> None:
        self._rates = rates
        self.draft: NgramDraft | None = None
        self._tokens = tokens
        self._orders = range(options.prompt_lookup_max, options.prompt_lookup_min - 1, -1)
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

    def grow(self, budget: Budget) -> NgramDraft:
        """Draft up to `width` continuations with different first tokens, the longest context and the latest first."""
        tokens = self._tokens
        draft = NgramDraft([tokens[-1]])
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

    def _append(self, draft: NgramDraft, place: int, length: int, depth: int) -> bool:
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
            parent = draft.add(tokens[place + step % period], parent, prob, kind)
            draft.first.add(tokens[place])
            kind = min(length + step + 1, LONGEST_MATCH) * RANKS
        return True


class NgramDrafter(LookupDrafter):
    """Drafts by prompt lookup. Rates that one request has learned serve the next."""

    method = find_method(NGRAM)

    def __init__(self, verifier: Verifier, options: NgramOptions | None = None) -> None:
        super().__init__(verifier, options)
        self._rates = [first * later for first in STARTING_RATES for later in _LATER_SIBLING]

    def begin(self, seq: Request) -> None:
        seq.drafting[self] = NgramIndex(seq.tokens, self.options, self._rates)

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return the looked-up tree, if the lookup found one."""
        index: NgramIndex = seq.drafting[self]
        index.extend()
        draft = index.grow(budget)
        if len(draft.tokens) == 1:
            return ()
        index.draft = draft
        return (Offer(self._key, prune(make_tree(draft.tokens, draft.parents, draft.probs), budget.nodes)),)

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft: continuations of the decoded path are correct or wrong, verified or not."""
        index: NgramIndex = seq.drafting[self]
        draft, index.draft = index.draft, None
        if draft is not None:
            draft.update(self._rates, outcome.tokens)


DRAFTER = NgramDrafter
