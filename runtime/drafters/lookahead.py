"""Lookahead decoding: it drafts n-grams that the verifier wrote itself, in a window of guesses that it iterates.

Fu et al. 2024 (arXiv 2402.02057), section 3. The lookahead branch is the window (`lookahead_window`). The verification
branch are up to G n-grams of the pool that begin with the latest token. Both are one tree, and what they share is
computed once. The window's nodes are pinned, since a step reads the verifier's tokens after them.

A budget below the window's size verifies its first columns only, next to one n-gram if the pool has one, or n-grams
alone. In plain steps the window only moves on. The pool and the window belong to one request.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Self

from redraft.engines.bundle import Bundle
from redraft.methods import find_method
from redraft.methods.unbuilt import LookaheadOptions
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.learning import moved
from redraft.runtime.drafters.lookahead_window import Pool, Window
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree, within
from redraft.runtime.verifier import Verifier
from redraft.types import NOT_REACHED, Budget, OfferKind, Outcome, Tree

RANKS = 3
"""Ranks among siblings with rates of their own. Later siblings share the last rank."""
_FIRST, _LATER, _GUESS = (0.3, 0.15, 0.08), (0.6, 0.2, 0.1), 0.05
"""Shares of correct nodes before anything is learned: first and later tokens of n-grams by rank, and guesses."""
_LEARNING_RATE = 1 / 32
_LEAST = 1e-30
"""Least joint probability of a node, so that its logarithm is a number."""


class Draft:
    """A tree in progress: tokens, parents, joint probabilities, kinds and pinned nodes. Paths share their beginnings.

    rates:   share of correct nodes by kind. A kind is depth and rank among siblings; the last kind is that of guesses.
    guesses: the paths of guesses.
    """

    def __init__(self, root: int, rates: list[float]) -> None:
        self.rates = rates
        self.tokens, self.parents, self.probs, self.kinds, self.pinned = [root], [-1], [1.0], [-1], [False]
        self.guesses: list[Several[int]] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._children = [0]

    def add_ngram(self, path: Several[int]) -> None:
        """Add a path of candidates below the root."""
        node = 0
        for depth, token in enumerate(path):
            node = self._child(node, token, depth * RANKS + min(self._children[node], RANKS - 1))

    def add_guesses(self, path: Several[int]) -> None:
        """Add a path of pinned guesses below the root."""
        self.guesses.append(path)
        node = 0
        for token in path:
            node = self._child(node, token, len(self.rates) - 1)
            self.pinned[node] = True

    def _child(self, parent: int, token: int, kind: int) -> int:
        """Return the child of a node with this token. A new one has this kind."""
        node = self._nodes.get((parent, token))
        if node is None:
            node = self._nodes[parent, token] = len(self.tokens)
            self._children[parent] += 1
            self._children.append(0)
            self.tokens.append(token)
            self.parents.append(parent)
            self.probs.append(max(self.probs[parent] * self.rates[kind], _LEAST))
            self.kinds.append(kind)
            self.pinned.append(False)
        return node

    def learn(self, committed: Several[int]) -> None:
        """Learn from the committed tokens, for every node whose parent is among them."""
        depths = {0: 0}
        for node in range(1, len(self.tokens)):
            depth = depths.get(self.parents[node], len(committed))
            if depth < len(committed):
                is_right = self.tokens[node] == committed[depth]
                kind = self.kinds[node]
                self.rates[kind] = moved(self.rates[kind], is_right, _LEARNING_RATE)
                if is_right:
                    depths[node] = depth + 1


@dataclass(slots=True)
class RequestState:
    """State of a request: its window, its pool, and its draft of this step."""

    window: Window
    pool: Pool
    draft: Draft | None = None


class LookaheadDrafter(Drafter):
    """Offers the window and the n-grams after the latest token. Rates that one request has learned serve the next."""

    branches = True

    def __init__(self, verifier: Verifier, options: LookaheadOptions | None = None) -> None:
        super().__init__(verifier)
        self.name = "lookahead"
        options = options or LookaheadOptions()
        self._columns, self._most = options.max_window_size, options.max_verification_set_size
        self._rows = options.max_ngram_size - 1
        self._rates = [*_FIRST, *_LATER * (self._rows - 1), _GUESS]
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the drafter with options as `LookaheadOptions`. Raises UsageError."""
        return cls(verifier, find_method("lookahead").parse_options(options))

    def begin(self, seq: Sequence) -> None:
        """Create the window from the prompt, and an empty pool."""
        seq.drafting[self] = RequestState(Window(self._columns, self._rows, seq.tokens), Pool(self._most))

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return one tree of n-grams and pinned guesses."""
        state: RequestState = seq.drafting[self]
        draft = state.draft = Draft(seq.tokens[-1], self._rates)
        ngrams = state.pool.after(seq.tokens[-1])
        for ngram in ngrams:
            draft.add_ngram(ngram)
        for path in state.window.paths(self.columns(budget, bool(ngrams))):
            draft.add_guesses(path)
        if len(draft.tokens) == 1:
            return ()
        return (Offer(self._key, within(make_tree(draft.tokens, draft.parents, draft.probs, draft.pinned), budget)),)

    def columns(self, budget: Budget, with_ngram: bool) -> int:
        """Return how many columns of the window fit into a budget, next to one n-gram or alone."""
        rows = self._rows
        for columns in range(self._columns, 0, -1):
            nodes = rows * columns - 1 + rows * with_ngram
            depth = rows - 1 + columns - 1
            width = min(rows, columns) + with_ngram
            if nodes <= budget.nodes and depth <= budget.depth and width <= budget.width:
                return columns
        return 0

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft, update the window, and add its n-grams to the pool."""
        state: RequestState = seq.drafting[self]
        passed = len(outcome.tokens)
        draft, state.draft = state.draft, None
        if draft is not None:
            draft.learn(outcome.tokens)
            targets = targets_after(draft.guesses, tree, outcome)
            for ngram in state.window.iterate(draft.tokens[0], targets):
                state.pool.add(ngram)
            passed -= any([target != NOT_REACHED for target in targets])  # the iteration is the first position
        state.window.move(passed)


def targets_after(paths: Several[Several[int]], tree: Tree, outcome: Outcome) -> list[int]:
    """Return the verifier's token after the end of each path below the root; NOT_REACHED if the tree lacks a path."""
    nodes = {key: node for node, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    targets = []
    for path in paths:
        node: int | None = 0
        for token in path:
            node = None if node is None else nodes.get((node, token))
        targets.append(NOT_REACHED if node is None else outcome.target_token_ids[node])
    return targets


DRAFTER = LookaheadDrafter
