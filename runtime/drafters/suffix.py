"""Suffix decoding: it drafts continuations of the latest tokens in the request's text and a tenant's earlier outputs.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), section 3 and algorithm 1. The frequency of a candidate is its count
among the places of one context, divided by the count of all candidates there. The frequencies along a path are
multiplied. Among the trees of several context lengths, the drafter selects the one with the largest sum.

The paper uses frequencies as probabilities. This drafter multiplies each one by the recent share of correct
candidates with the same length of context and number of places. So the controller can compare gains with
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from redraft.errors import UsageError
from redraft.methods import find_method
from redraft.methods.unbuilt import SuffixOptions
from redraft.runtime.drafters.lookup import LEAST_PROBABILITY, STARTING_RATES, GrowingDraft, LookupDrafter, moved
from redraft.runtime.drafters.suffix_tree import LEAF_PLACES, Match, SuffixStore, SuffixTree
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Offer
from redraft.runtime.trees.tree import make_tree, prune
from redraft.types import Budget, Outcome, Tree

ENOUGH_PLACES = 3
"""A context with fewer places is compared with a shorter one that has more."""
_KINDS = len(STARTING_RATES)
_LONGEST = _KINDS - 1


class Rates:
    """Shares of correct candidates, divided by their frequencies.

    A kind is the length of context and min(places, ENOUGH_PLACES).
    """

    def __init__(self) -> None:
        self._true = [rate for rate in STARTING_RATES for _ in range(ENOUGH_PLACES)]
        self._promised = [1.0] * len(self._true)
        self.values = list(self._true)

    def learn(self, kind: int, frequency: float, is_correct: bool) -> None:
        """Learn from a candidate whose parent is correct."""
        self._true[kind] = moved(self._true[kind], is_correct)
        self._promised[kind] = moved(self._promised[kind], frequency)
        self.values[kind] = min(self._true[kind] / self._promised[kind], 1.0)


@dataclass(slots=True)
class SuffixDraft(GrowingDraft):
    """A tree with the frequency of each node among its siblings.

    rates: rates of its candidates.   most: nodes after the root that may be offered.
    """

    rates: Rates = field(default_factory=Rates)
    frequencies: list[float] = field(default_factory=lambda: [1.0])
    most: int = 0

    def append(self, token: int, parent: int, frequency: float, kind: int) -> int:
        """Add a node and return its number, or 0 if it is too unlikely."""
        prob = self.probs[parent] * frequency * self.rates.values[kind]
        if prob < LEAST_PROBABILITY:
            return 0
        self.frequencies.append(frequency)
        return self.add(token, parent, prob, kind)

    def learn(self, committed: Sequence[int]) -> None:
        """Learn from the committed tokens, for every candidate whose parent is among them."""
        for node, is_correct in self.compared(committed):
            self.rates.learn(self.kinds[node], self.frequencies[node], is_correct)


@dataclass(slots=True)
class RequestState:
    """State of a request: the tree of its text, the indexed length, and its drafts of this step."""

    tree: SuffixTree
    indexed: int = 1
    drafts: list[SuffixDraft] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens after those of the last call."""
        self.tree.add(0, tokens, self.indexed)
        self.indexed = len(tokens)


class SuffixDrafter(LookupDrafter):
    """Offers a tree from the request's own text, and one from the outputs of the request's tenant.

    Requests share learned rates. Only requests of one tenant share texts.
    """

    method = find_method("suffix")

    def __init__(self, verifier: Verifier, options: SuffixOptions | None = None) -> None:
        super().__init__(verifier, options)
        limits: SuffixOptions = self.options
        self._context = limits.suffix_decoding_max_tree_depth - 1
        self._own_rates, self._stored_rates = Rates(), Rates()
        self.store: SuffixStore | None = None
        if most := limits.suffix_decoding_max_cached_requests:
            self.store = SuffixStore(most, limits.suffix_decoding_max_cached_tokens, self._context)

    def check_tenant(self) -> None:
        if self.store is None:
            raise UsageError(
                f"{self.name} keeps no earlier outputs, so a tenant would change nothing",
                "set its option suffix_decoding_max_cached_requests, or leave the tenant out",
            )

    def forget(self, tenant: str) -> None:
        if self.store is not None:
            self.store.forget(tenant)

    def begin(self, seq: Request) -> None:
        state = seq.drafting[self] = RequestState(SuffixTree(self._context))
        state.extend(seq.tokens)

    def finish(self, seq: Request) -> None:
        """Add the output to the store."""
        if self.store is not None and seq.tenant is not None:
            self.store.add(seq.tenant, seq.tokens[: seq.prompt_length], seq.new_tokens)

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return the trees from the request's text and from its tenant's outputs."""
        state: RequestState = seq.drafting[self]
        tokens = seq.tokens
        state.extend(tokens)
        state.drafts = [self._best(state.tree, tokens, budget, self._own_rates, repeats=True)]
        if self.store is not None and seq.tenant is not None and (stored := self.store.tree(seq.tenant)):
            state.drafts.append(self._best(stored, tokens, budget, self._stored_rates))
        return [
            Offer(self._key, prune(make_tree(draft.tokens, draft.parents, draft.probs), min(draft.most, budget.nodes)))
            for draft in state.drafts
            if len(draft.tokens) > 1
        ]

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Learn from the drafts: candidates are correct or wrong, verified or not."""
        state: RequestState = seq.drafting[self]
        for draft in state.drafts:
            draft.learn(outcome.tokens)
        state.drafts = []

    def _best(
        self, tree: SuffixTree, tokens: Sequence[int], budget: Budget, rates: Rates, repeats: bool = False
    ) -> SuffixDraft:
        """Return the draft with the largest sum of probabilities (section 3).

        It is the draft of the longest context, or of a shorter one if the longest has few places.
        repeats: True if a continuation that reaches the end of its text repeats itself.
        """
        best = SuffixDraft([tokens[-1]], rates=rates)
        for match in tree.matches(tokens):
            draft = SuffixDraft([tokens[-1]], rates=rates, most=self._most(match.length))
            self._grow(draft, tree, match, min(draft.most, budget.depth), repeats)
            if sum(draft.probs) > sum(best.probs):
                best = draft
            if len(match.places) >= ENOUGH_PLACES:
                break
        return best

    def _grow(self, draft: SuffixDraft, tree: SuffixTree, match: Match, depth: int, repeats: bool) -> None:
        """Fill a draft with a context's continuations (algorithm 1), at most `depth` tokens deep."""
        paths = [tree.following(place, depth) for place in match.places[: -1 - LEAF_PLACES : -1]]
        if repeats:
            paths = [_repeated(path, depth) for path in paths]
        branches = [(0, 0, 1.0, paths)]
        while branches:
            parent, step, share, paths = branches.pop()
            groups: dict[int, list[Sequence[int]]] = {}
            for path in paths:
                if step < len(path):
                    groups.setdefault(path[step], []).append(path)
            total = sum(map(len, groups.values()))
            for token, group in groups.items():
                frequency = len(group) / total
                joint = share * frequency
                if joint >= self.options.suffix_decoding_min_token_prob:
                    kind = min(match.length + step, _LONGEST) * ENOUGH_PLACES + min(len(group), ENOUGH_PLACES) - 1
                    if node := draft.append(token, parent, frequency, kind):
                        branches.append((node, step + 1, joint, group))

    def _most(self, length: int) -> int:
        """Return how many tokens may follow a context of `length` tokens. Only its last tokens may count."""
        depth: int = self._context + 1
        factor: float = self.options.suffix_decoding_max_spec_factor
        used = min(length, max(int(depth / (1 + factor)), 1))
        return max(min(int(factor * used), depth - used), 1)


def _repeated(path: Sequence[int], count: int) -> Sequence[int]:
    """Return a text, repeated to `count` tokens if it is shorter."""
    if len(path) >= count:
        return path
    return [path[place % len(path)] for place in range(count)]


DRAFTER = SuffixDrafter
