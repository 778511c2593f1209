"""A decoder's drafts while they grow: chains token by token, and trees from the candidates of their likeliest nodes.

Li et al. 2024 (EAGLE-2), section 4: each level expands the nodes of the largest joint probability, and the tree keeps
the likeliest of all nodes. Joint probabilities never grow along a path, so parents come before their children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log

import numpy as np

from redraft.runtime.requests.request import Request
from redraft.types import BoolArray, Budget, DraftTree, Draws, FloatArray, Proposal


def least_log_probs(budget: Budget, drawn: bool) -> tuple[float, float]:
    """Return the logarithms under which a token's probability, and the joint one, end a draft.

    drawn: tokens are drawn, so that no probability may end it.
    """
    shares = (0.0, 0.0) if drawn else (budget.confidence or 0.0, budget.share)
    least, least_joint = (log(share) if share > 0 else -inf for share in shares)
    return least, least_joint


@dataclass(slots=True)
class Chain:
    """A draft in progress.

    left: levels that the budget still allows.   least, least_joint: logarithms under which a token's probability, and
    the joint one, end the draft.   logits: of each level, if its tokens are drawn.
    """

    left: int
    least: float
    least_joint: float
    tokens: list[int]
    log_probs: list[float] = field(default_factory=lambda: [0.0])
    logits: list[FloatArray] = field(default_factory=list)

    @classmethod
    def of(cls, seq: Request, budget: Budget, steps: int) -> Chain:
        """Return the chain of the root alone."""
        left = min(budget.depth, budget.nodes, steps) if budget.width else 0
        return cls(left, *least_log_probs(budget, seq.noise.drawn), [seq.tokens[-1]])

    @property
    def may_stop(self) -> bool:
        """True if a token's probability may end the draft."""
        return max(self.least, self.least_joint) > -np.inf

    def add(self, token: int, log_prob: float) -> None:
        """Add a level, unless the draft has ended."""
        if not self.left:
            return
        joint = self.log_probs[-1] + log_prob
        self.tokens.append(token)
        self.log_probs.append(joint)
        self.left = 0 if log_prob < self.least or joint < self.least_joint else self.left - 1


@dataclass
class GrowingTree:
    """A tree in progress. Node 0 is the root.

    width: most nodes of a level that are expanded, and candidates of a node.   most: nodes to keep, without the root.
    least, least_joint: logarithms under which a node's probability, and the joint one, leave it without candidates.
    log_probs: joint.   rows: expanded nodes but the root, in the order of their rows.   ends: the last of them, or the
    root, which wait for candidates.
    """

    width: int
    most: int
    least: float
    least_joint: float
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    log_probs: list[float] = field(default_factory=lambda: [0.0])
    depths: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(cls, root: int, budget: Budget, width: int, most: int, drawn: bool = False) -> GrowingTree:
        """Return the tree of the root alone. drawn: candidates are drawn."""
        return cls(width, most, *least_log_probs(budget, drawn), [root])

    def grow(self, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], last: bool) -> None:
        """Add candidates of the nodes in `ends`, best first, and choose the next ones; none after the last level."""
        grown = []
        for parent, found, shares in zip(self.ends, tokens, log_probs, strict=False):
            for token, share in zip(found[: self.width], shares, strict=False):
                joint = self.log_probs[parent] + share
                if share >= self.least and joint >= self.least_joint:
                    grown.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(parent)
                self.log_probs.append(joint)
                self.depths.append(self.depths[parent] + 1)
        grown.sort(key=lambda node: -self.log_probs[node])
        self.ends = [] if last else [node for node in grown[: self.width] if self._can_bring_more(node)]
        self.rows += self.ends

    def _can_bring_more(self, node: int) -> bool:
        """Return True if children of a node may be among the nodes to keep."""
        others = sorted(self.log_probs[1:], reverse=True)
        return len(others) < self.most or self.log_probs[node] > others[self.most - 1]

    def mask(self) -> BoolArray:
        """Return bool [rows, rows]: row j is row i or an ancestor of it."""
        place = {node: row for row, node in enumerate(self.rows)}
        mask = np.eye(len(self.rows), dtype=np.bool_)
        for row, node in enumerate(self.rows):
            if (above := place.get(self.parents[node])) is not None:
                mask[row] |= mask[above]
        return mask

    def whole(self, proposal: Proposal | None) -> DraftTree:
        """Return all nodes in order of joint probability, the root first."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.log_probs[node])
        place = {node: index for index, node in enumerate(order)} | {-1: -1}
        return DraftTree(
            np.array([self.tokens[node] for node in order], np.int64),
            np.array([place[self.parents[node]] for node in order], np.int64),
            np.array([self.log_probs[node] for node in order], np.float32),
            Draws.of(proposal, len(order)),
        )
