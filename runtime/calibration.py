"""How often drafted nodes are kept, learned from verifications: by depth and probability, or by rank."""

from __future__ import annotations

from math import exp, log

import numpy as np

from redraft.types import DraftTree, Tree

FAST, SLOW = 1 / 32, 1 / 128
"""Weights of one observation in running means: of one sequence's, and of what all of them share."""
_SETTLED = 31
"""Observations after which a mean over all of them becomes a running one: FAST is the weight of the next."""
_DEPTHS, _BUCKETS, _BUCKETS_A_NAT = 4, 12, 3
_LEAST = 0.01
_UNSEEN = 0.25
"""Share of kept nodes that is taken for granted where nothing was seen: enough for whole trees to be tried."""


class DepthCalibration:
    """How often tokens that a drafter's trees give some probability come true, by depth and probability.

    A drafter is trained to say how likely a token is to be sampled; what counts here is how likely it is to be kept,
    which for a greedy verifier is another number. Shares are running means that begin with the probability itself.
    """

    def __init__(self) -> None:
        shares = [exp(-(bucket + 0.5) / _BUCKETS_A_NAT) for bucket in range(_BUCKETS)]
        self._shares = [list(shares) for _ in range(_DEPTHS)]

    def observe(self, tree: Tree, tokens: tuple[int, ...]) -> None:
        """Compare the tree with what was said, down to where it does not follow."""
        ids, parents, log_probs = tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist()
        node = 0
        for depth, token in enumerate(tokens):
            shares = self._shares[depth if depth < _DEPTHS else -1]
            next_node = -1
            for child in range(node + 1, len(parents)):
                if parents[child] == node:
                    kept = ids[child] == token
                    bucket = min(int((log_probs[node] - log_probs[child]) * _BUCKETS_A_NAT), _BUCKETS - 1)
                    shares[bucket] += FAST * (kept - shares[bucket])
                    if kept:
                        next_node = child
            if next_node < 0:
                return
            node = next_node

    def calibrated(self, tree: Tree) -> Tree:
        """The tree with, for each node's probability given its parent, the share of such nodes that came true."""
        parents, log_probs = tree.parents.tolist(), tree.log_probs.tolist()
        depths, corrected = [0] * len(parents), [0.0] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            depth = depths[parent]
            depths[node] = depth + 1
            bucket = min(int((log_probs[parent] - log_probs[node]) * _BUCKETS_A_NAT), _BUCKETS - 1)
            share = self._shares[depth if depth < _DEPTHS else -1][bucket]
            corrected[node] = corrected[parent] + log(share if share > _LEAST else _LEAST)
        return DraftTree(tree.tokens, tree.parents, np.array(corrected, dtype=np.float32))


class RankCalibration:
    """How often the node of each rank is kept, of trees that stay on a device and come likeliest first.

    Running means, at first over all there is. What is not verified is forgotten slowly, so that it is tried again.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._seen: list[int] = []

    def shares(self, nodes: int) -> list[float]:
        """Of the first so many nodes beside the root, how often each is kept."""
        self._grow(nodes)
        return self._shares[:nodes]

    def observe(self, nodes: int, path: tuple[int, ...]) -> None:
        """Of the first `nodes` nodes, root included, those of `path` were kept."""
        count = nodes - 1
        self._grow(count)
        shares, seen = self._shares, self._seen
        kept = [0] * nodes
        for node in path:
            kept[node] = 1
        for place in range(count):
            times = seen[place] = seen[place] + 1
            share = shares[place]
            shares[place] = share + (1 / (1 + times) if times < _SETTLED else FAST) * (kept[place + 1] - share)
        for place in range(count, len(shares)):
            shares[place] += SLOW * (_UNSEEN - shares[place])

    def _grow(self, count: int) -> None:
        missing = count - len(self._shares)
        self._shares += [_UNSEEN] * missing
        self._seen += [0] * missing
