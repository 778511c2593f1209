"""Lookahead decoding: it drafts n-grams that the verifier wrote itself, in a window of guesses that it iterates.

Fu et al. 2024 (arXiv 2402.02057), section 3. The lookahead branch is the window. The verification branch are up to G
n-grams of the pool that begin with the latest token. Both are one tree, and what they share is computed once. The
window's nodes are pinned, since a step reads the verifier's tokens after them.

A budget below the window's size verifies its first columns only, next to one n-gram if the pool has one, or n-grams
alone. In plain steps the window only moves on. The pool and the window belong to one request.

The window has N - 1 rows and W columns. Cell (r, c) is a guess of the token at position r + c after the latest one,
which is (0, 0), the tree's root. In the tree, (0, c) hangs on (0, c - 1), and (r, c) on (r - 1, c). For W = 4, N = 4:

    (0, 0) ── (0, 1) ── (0, 2) ── (0, 3)
    (1, 0)    (1, 1)    (1, 2)    (1, 3)      each below the cell above it
    (2, 0)    (2, 1)    (2, 2)    (2, 3)
     new       new       new       new        the verifier's tokens after the last row

So a cell sees itself, those above it in its column, and the first row up to its column. That is the paper's attention
mask (its figure of mask and positions), and a node's depth r + c is the position there. Cells with one path are one
node of the tree: the verifier would compute the same logits for each.

A step is one Jacobi iteration. Each column with the new token below it is an n-gram for the pool. Then row r takes the
tokens of row r + 1, and the last row takes the new ones.

This differs from the paper's algorithm in four points, none of which changes a text:

- The paper draws the first guesses at random. Here they are the request's own tokens, in turn, so runs repeat.
- If a step commits k more tokens than one, the paper drops k columns and draws new ones at random. Here the columns
  rotate, so the new ones are the dropped ones: guesses of the verifier instead of noise.
- N-grams count once the verifier has chosen all their tokens but the first.
- The paper verifies n-grams alone. Here guesses that prove right are accepted too, like all nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from redraft.methods import find_method
from redraft.methods.unbuilt import LookaheadOptions
from redraft.runtime.drafters.lookup import GrowingDraft, LookupDrafter
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Offer
from redraft.runtime.trees.tree import make_tree, within
from redraft.types import NOT_REACHED, Budget, Outcome, Tree

Ngram = tuple[int, ...]


class Pool:
    """N-grams by first token, at most `most` of each. A new one takes the place of the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._following: dict[int, dict[Ngram, None]] = {}

    def add(self, ngram: Ngram) -> None:
        """Add an n-gram, or make it the latest of its first token."""
        following = self._following.setdefault(ngram[0], {})
        following.pop(ngram[1:], None)
        following[ngram[1:]] = None
        if len(following) > self._most:
            del following[next(iter(following))]

    def after(self, token: int) -> list[Ngram]:
        """Return the n-grams that begin with `token`, without it, the latest first."""
        return list(reversed(self._following.get(token, {})))


@dataclass(slots=True)
class Column:
    """The N - 1 guesses of a column, row 0 first.

    seeds: how many of the first ones the verifier did not choose.
    """

    tokens: list[int]
    seeds: int


class Window:
    """The columns of a request. In column 0 the root takes the place of the first guess."""

    def __init__(self, columns: int, rows: int, seeds: Sequence[int]) -> None:
        """Fill the cells row by row with `seeds`, over and over."""
        self.columns = [
            Column([seeds[(row * columns + place) % len(seeds)] for row in range(rows)], rows)
            for place in range(columns)
        ]

    def paths(self, columns: int) -> list[list[int]]:
        """Return the tokens below the root down to the last cell, for each of the first columns."""
        chain = [column.tokens[0] for column in self.columns[1:columns]]
        return [[*chain[:place], *column.tokens[1:]] for place, column in enumerate(self.columns[:columns])]

    def iterate(self, root: int, targets: Sequence[int]) -> list[Ngram]:
        """Do one Jacobi iteration, and return the n-grams that it completed, column 0 first.

        targets: the verifier's tokens after the last cells of the first columns; NOT_REACHED if it computed none, which
        leaves the column as it is. The window is then one position further.
        """
        ngrams = []
        for place, target in enumerate(targets):
            if target != NOT_REACHED:
                column = self.columns[place]
                if column.seeds < 2:
                    ngrams.append((column.tokens[0] if place else root, *column.tokens[1:], target))
                column.tokens = [*column.tokens[1:], target]
                column.seeds = max(column.seeds - 1, 0)
        return ngrams

    def move(self, positions: int) -> None:
        """Move the window by some positions."""
        passed = positions % len(self.columns)
        self.columns = self.columns[passed:] + self.columns[:passed]


RANKS = 3
"""Ranks among siblings with rates of their own. Later siblings share the last rank."""
_FIRST, _LATER, _GUESS = (0.3, 0.15, 0.08), (0.6, 0.2, 0.1), 0.05
"""Shares of correct nodes before anything is learned: first and later tokens of n-grams by rank, and guesses."""
_LEAST = 1e-30
"""Least joint probability of a node, so that its logarithm is a number."""


@dataclass(slots=True)
class LookaheadDraft(GrowingDraft):
    """A tree of n-grams and pinned guesses. Paths share their beginnings.

    rates:   share of correct nodes by kind. A kind is depth and rank among siblings; the last kind is that of guesses.
    guesses: the paths of guesses.
    """

    rates: list[float] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=lambda: [False])
    guesses: list[Sequence[int]] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    _children: list[int] = field(default_factory=lambda: [0])

    def add_ngram(self, path: Sequence[int]) -> None:
        """Add a path of candidates below the root."""
        node = 0
        for depth, token in enumerate(path):
            node = self._child(node, token, depth * RANKS + min(self._children[node], RANKS - 1))

    def add_guesses(self, path: Sequence[int]) -> None:
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
            prob = max(self.probs[parent] * self.rates[kind], _LEAST)
            node = self._nodes[parent, token] = self.add(token, parent, prob, kind)
            self._children[parent] += 1
            self._children.append(0)
            self.pinned.append(False)
        return node


@dataclass(slots=True)
class RequestState:
    """State of a request: its window, its pool, and its draft of this step."""

    window: Window
    pool: Pool
    draft: LookaheadDraft | None = None


class LookaheadDrafter(LookupDrafter):
    """Offers the window and the n-grams after the latest token. Rates that one request has learned serve the next."""

    method = find_method("lookahead")
    branches = True

    def __init__(self, verifier: Verifier, options: LookaheadOptions | None = None) -> None:
        super().__init__(verifier, options)
        self._columns, self._most = self.options.max_window_size, self.options.max_verification_set_size
        self._rows = self.options.max_ngram_size - 1
        self._rates = [*_FIRST, *_LATER * (self._rows - 1), _GUESS]

    def begin(self, seq: Request) -> None:
        """Create the window from the prompt, and an empty pool."""
        seq.drafting[self] = RequestState(Window(self._columns, self._rows, seq.tokens), Pool(self._most))

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return one tree of n-grams and pinned guesses."""
        state: RequestState = seq.drafting[self]
        draft = state.draft = LookaheadDraft([seq.tokens[-1]], rates=self._rates)
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

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft, update the window, and add its n-grams to the pool."""
        state: RequestState = seq.drafting[self]
        passed = len(outcome.tokens)
        draft, state.draft = state.draft, None
        if draft is not None:
            draft.update(self._rates, outcome.tokens)
            targets = targets_after(draft.guesses, tree, outcome)
            for ngram in state.window.iterate(draft.tokens[0], targets):
                state.pool.add(ngram)
            passed -= any([target != NOT_REACHED for target in targets])  # the iteration is the first position
        state.window.move(passed)


def targets_after(paths: Sequence[Sequence[int]], tree: Tree, outcome: Outcome) -> list[int]:
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
