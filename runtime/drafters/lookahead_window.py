"""The window of guesses and the pool of n-grams of lookahead decoding (Fu et al. 2024, arXiv 2402.02057, section 3).

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

from collections.abc import Sequence as Several
from dataclasses import dataclass

from redraft.types import NOT_REACHED

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

    def __init__(self, columns: int, rows: int, seeds: Several[int]) -> None:
        """Fill the cells row by row with `seeds`, over and over."""
        self.columns = [
            Column([seeds[(row * columns + place) % len(seeds)] for row in range(rows)], rows)
            for place in range(columns)
        ]

    def paths(self, columns: int) -> list[list[int]]:
        """Return the tokens below the root down to the last cell, for each of the first columns."""
        chain = [column.tokens[0] for column in self.columns[1:columns]]
        return [[*chain[:place], *column.tokens[1:]] for place, column in enumerate(self.columns[:columns])]

    def iterate(self, root: int, targets: Several[int]) -> list[Ngram]:
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
