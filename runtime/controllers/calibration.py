"""Acceptance rates of drafted nodes, learned from verifications."""

from __future__ import annotations

from math import exp, log

import numpy as np

from redraft.types import DraftTree, Tree

FAST, SLOW = 1 / 32, 1 / 128
"""Weights of one observation in running means: those of one sequence, and those that all sequences share."""
_SETTLED = 31
"""Observations before a plain mean becomes a running one, in which the next has the weight FAST."""
_DEPTHS, _BUCKETS, _BUCKETS_A_NAT = 4, 12, 3
_LEAST = 0.01
_TOKENS_BELOW = 0.5
"""Assumed accepted tokens below a node, by its joint probability, until drafts have continued below nodes."""
_UNSEEN = 0.25
"""Assumed acceptance rate of nodes that were never verified, high enough for whole trees to be tried."""


class DepthCalibration:
    """Acceptance rates of a drafter's nodes, by depth and drafted probability.

    A drafter learns how likely a token is to be sampled. The controller needs how likely it is to be accepted, which
    differs if the verifier is greedy. Rates are running means that begin with the drafted probability itself.
    """

    def __init__(self) -> None:
        shares = [exp(-(bucket + 0.5) / _BUCKETS_A_NAT) for bucket in range(_BUCKETS)]
        self._shares = [list(shares) for _ in range(_DEPTHS)]
        self._below, self._above = _TOKENS_BELOW, 1.0

    @property
    def tokens_below(self) -> float:
        """Accepted children of nodes below the root, by the nodes' drafted joint probability: a running ratio.

        If a draft continues below a node of joint probability p, about this times p tokens below it are accepted.
        """
        return self._below / self._above

    def observe(self, tree: Tree, tokens: tuple[int, ...]) -> None:
        """Compare the tree with the committed tokens, down to the first token that it lacks."""
        ids, parents, log_probs = tree.tokens.tolist(), tree.parents.tolist(), tree.log_probs.tolist()
        node = matched = 0
        for depth, token in enumerate(tokens):
            shares = self._shares[depth if depth < _DEPTHS else -1]
            next_node = -1
            for child in range(node + 1, len(parents)):
                if parents[child] == node:
                    accepted = ids[child] == token
                    bucket = min(int((log_probs[node] - log_probs[child]) * _BUCKETS_A_NAT), _BUCKETS - 1)
                    shares[bucket] += FAST * (accepted - shares[bucket])
                    if accepted:
                        next_node = child
            if next_node < 0:
                break
            node, matched = next_node, matched + 1
        if above := sum(exp(log_probs[node]) for node in {*parents} if node > 0):
            self._above += FAST * (above - self._above)
            self._below += FAST * (max(matched - 1, 0) - self._below)

    def calibrated(self, tree: Tree) -> Tree:
        """Return the tree with the acceptance rate of such nodes in place of each node's conditional probability."""
        parents, log_probs = tree.parents.tolist(), tree.log_probs.tolist()
        depths, corrected = [0] * len(parents), [0.0] * len(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            depth = depths[parent]
            depths[node] = depth + 1
            bucket = min(int((log_probs[parent] - log_probs[node]) * _BUCKETS_A_NAT), _BUCKETS - 1)
            share = self._shares[depth if depth < _DEPTHS else -1][bucket]
            corrected[node] = corrected[parent] + log(share if share > _LEAST else _LEAST)
        return DraftTree(tree.tokens, tree.parents, np.array(corrected, dtype=np.float32), tree.draws)


class RankCalibration:
    """Acceptance rates by rank, for trees that stay on a device with their likeliest nodes first.

    They are means over all observations at first, and running means later. Rates of nodes that are not verified slowly
    return to the assumed one, so that such nodes are tried again.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._seen: list[int] = []

    def shares(self, nodes: int) -> list[float]:
        """Return the acceptance rates of the first `nodes` nodes after the root."""
        self._grow(nodes)
        return self._shares[:nodes]

    def observe(self, nodes: int, path: tuple[int, ...]) -> None:
        """Record a verification of the first `nodes` nodes, root included, that accepted those of `path`."""
        count = nodes - 1
        self._grow(count)
        shares, seen = self._shares, self._seen
        accepted = [0] * nodes
        for node in path:
            accepted[node] = 1
        for place in range(count):
            times = seen[place] = seen[place] + 1
            share = shares[place]
            shares[place] = share + (1 / (1 + times) if times < _SETTLED else FAST) * (accepted[place + 1] - share)
        for place in range(count, len(shares)):
            shares[place] += SLOW * (_UNSEEN - shares[place])

    def _grow(self, count: int) -> None:
        missing = count - len(self._shares)
        self._shares += [_UNSEEN] * missing
        self._seen += [0] * missing
