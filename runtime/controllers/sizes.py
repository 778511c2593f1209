"""How many nodes of trees are worth verifying, of one tree and of all trees of a batch together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import exp
from typing import NamedTuple

from redraft.types import BoolArray, FloatArray, Together

_ROUNDING = 1e-6


def ranked_shares(log_probs: FloatArray, pinned: BoolArray | None = None) -> list[float]:
    """Return the probabilities of the nodes after the root, likeliest first, from joint logarithms [n].

    Pinned nodes come before all others.
    """
    if pinned is None:
        return [exp(value) for value in sorted(log_probs[1:].tolist(), reverse=True)]
    ranks = sorted(zip(pinned[1:].tolist(), log_probs[1:].tolist(), strict=True), reverse=True)
    return [exp(value) for _, value in ranks]


def best_first(shares: Sequence[float], rate: float, table_ms: Sequence[float], least: int = 0) -> tuple[int, float]:
    """Return how many of the first nodes are worth verifying, at least the first `least`, and their gain.

    shares: probability of each node to be accepted.   rate: tokens a millisecond.   table_ms: cost by nodes.
    """
    best, nodes = 0.0, 0
    expected = rate * table_ms[1]  # the root's own time costs no tokens
    for count, (share, ms) in enumerate(zip(shares, table_ms[2:], strict=False), 1):  # the shorter one ends the loop
        expected += share
        gain = expected - rate * ms
        if count == least or (count > least and gain > best):
            best, nodes = gain, count
    return nodes, best


class TreeShares(NamedTuple):
    """Nodes of a tree after its root, in the order in which a cut keeps them.

    shares: probability of each to be accepted.   least: number of pinned nodes, which come first.
    """

    shares: Sequence[float]
    least: int


class Ranking:
    """The nodes of a batch's trees in the order in which they are worth verifying.

    packed: the call computes the nodes of all trees, so each drafted node costs one row. Pinned nodes come first, then
        the likeliest. A node comes after those before it in its own tree, so its place is by the least share so far.
    Otherwise all trees have one number of nodes. The n-th share is the sum of the trees' n-th ones.
    """

    def __init__(self, trees: Sequence[TreeShares], packed: bool) -> None:
        self._trees = trees
        self._owners: list[int] | None = None
        if len(trees) == 1:
            self.shares, self.least = trees[0]
        elif packed:
            self.least = sum([tree.least for tree in trees])
            ranks = [(1.0, slot, share) for slot, tree in enumerate(trees) for share in tree.shares[: tree.least]]
            ranks += sorted(
                [(place, slot, share)
                 for slot, tree in enumerate(trees)
                 for place, share in zip(_places(tree), tree.shares[tree.least :], strict=True)],
                key=lambda rank: -rank[0],
            )  # fmt: skip
            self.shares = [share for _, _, share in ranks]
            self._owners = [slot for _, slot, _ in ranks]
        else:
            self.least = max([tree.least for tree in trees])
            self.shares = [sum(ranked) for ranked in zip_longest(*[tree.shares for tree in trees], fillvalue=0.0)]

    def sizes(self, count: int) -> list[int]:
        """Return the nodes of each tree, after its root, if the first `count` of the order are verified."""
        if self._owners is None:
            return [min(count, len(tree.shares)) for tree in self._trees]
        counts = Counter(self._owners[:count])
        return [counts[slot] for slot in range(len(self._trees))]


def most_nodes(own: TreeShares, together: Together, table_ms: Sequence[float]) -> int:
    """Return the most nodes of one of a batch's trees that may be verified. Equal shares of other trees may come first.

    Raises ValueError if its shares are not among those of the batch.
    """
    count, _ = best_first(together.shares, together.rate, table_ms, together.least)
    if not together.packed:
        if any([share > of_all + _ROUNDING for share, of_all in zip_longest(own.shares, together.shares, fillvalue=0)]):
            raise ValueError("its shares are not among those of the batch")
        return count
    if Counter(own.shares) - Counter(together.shares):
        raise ValueError("its shares are not among those of the batch")
    likely = together.shares[together.least : count]
    return own.least + (sum([place >= min(likely) for place in _places(own)]) if likely else 0)


def _places(tree: TreeShares) -> list[float]:
    return list(accumulate(tree.shares[tree.least :], min))
