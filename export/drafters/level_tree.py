"""Trees of candidates in draft graphs: joint probabilities, the order of nodes, and growth by levels."""

from __future__ import annotations

import torch

from redraft.export.graph import tracing
from redraft.methods.chains import DRAWN_LOG_PROB

CERTAIN, LESS = -(2.0**-20), 1 + 2.0**-22
"""A child's joint log probability is at most its parent's times LESS, plus CERTAIN. So float32 has it below its
parent's, however sure the drafter is. Which of equal numbers a TopK takes first is left to each library."""
_NOT_FIRST = -1e4
"""Log probability of drawn candidates after the first, of which no such tree has any."""
IMPOSSIBLE = -1e30
"""The joint log probability of a node that does not count. Not -inf: ONNX Runtime's TopK on CUDA fills up its
rows with the smallest float32, which would come before it, with indices past the end."""


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities and the columns of the `count` likeliest tokens, [..., count], of logits [..., H].

    ONNX Runtime's LogSoftmax takes 7 microseconds for three rows of 12,288 columns, and its ReduceLogSumExp 120.
    """
    columns = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count, -1).indices
    return torch.log_softmax(logits, -1).gather(-1, columns), columns


def rank_log_probs(width: int) -> torch.Tensor:
    """Return the log probabilities of drawn candidates by rank, [W]."""
    return torch.arange(1, width + 1) * DRAWN_LOG_PROB


def drawn_ranks(width: int) -> torch.Tensor:
    """Return the same for trees that keep the chain of first draws alone, [W]."""
    return torch.cat([rank_log_probs(1), torch.full((width - 1,), _NOT_FIRST)])


def below(parents: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return sums of joint log probabilities of parents and of numbers of their children, each below its parent's."""
    return torch.minimum(parents + added, parents * LESS + CERTAIN)


def ordered_tree(
    root: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, joint: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, parents and joint log probabilities of a tree [B, K]: the root, and the candidates in this order.

    root: tokens [B, 1].   tokens, parents, joint: of all candidates, [B, C]. Parents are places among the candidates
    from 1 on; 0 is the root.   order: candidates [B, K - 1], parents before children.
    """
    numbers = torch.arange(1, order.shape[1] + 1)[None].expand(order.shape[0], -1)
    numbered = torch.zeros_like(torch.cat([root, tokens], dim=1)).scatter(1, order + 1, numbers)
    none = torch.full_like(root, -1)
    certain = torch.zeros_like(root, dtype=torch.float32)
    return (
        torch.cat([root, tokens.gather(1, order)], dim=1),
        torch.cat([none, numbered.gather(1, parents.gather(1, order))], dim=1),
        torch.cat([certain, joint.gather(1, order)], dim=1),
    )


class LevelTree:
    """A tree in progress, level by level. Candidate c of a level of R rows is the candidate c % W of row c // W.

    Scores order nodes: joint log probabilities, or sums of ranks if the tree is static.
    """

    def __init__(self, width: int, drawn: torch.Tensor, ranks: torch.Tensor, static: bool = False) -> None:
        """drawn: 1 for sequences whose candidates are drawn, [B].   ranks: log probabilities of these by rank, [W]."""
        self._width, self._static = width, static
        self._drawn, self._ranks = drawn[:, None, None] > 0, ranks
        self._columns: list[torch.Tensor] = []  # of every level's candidates, [B, R * W] each
        self._parents: list[torch.Tensor] = []  # places of their parents among all candidates, from 1; the root's is 0
        self._joint: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = [] if static else self._joint
        nothing = torch.zeros_like(drawn, dtype=torch.float32)[:, None]
        self._rows = torch.zeros_like(drawn)[:, None], nothing, nothing  # places, joint and scores of the rows

    def grow(self, logits: torch.Tensor) -> None:
        """Add the candidates of the latest rows from their logits with noise and scale, [B, R, H]."""
        self.add(*likeliest(logits, self._width))

    def add(self, log_probs: torch.Tensor, columns: torch.Tensor) -> None:
        """Add these candidates of the latest rows, with their log probabilities after their parents, [B, R, W]."""
        log_probs = torch.where(self._drawn, self._ranks, log_probs)
        places, joint, scores = self._rows
        self._columns.append(columns.flatten(1))
        self._parents.append(places[:, :, None].expand(-1, -1, self._width).flatten(1))
        self._joint.append(below(joint[:, :, None], log_probs).flatten(1))
        if self._static:
            ranks = torch.where(self._drawn, self._ranks, rank_log_probs(self._width))
            self._scores.append(below(scores[:, :, None], ranks).flatten(1))

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the W best candidates of the latest level: the rows of the next level.

        Returns the rows of their parents and their columns, [B, W].
        """
        scores, best = self._scores[-1].topk(self._width, -1)
        before = 1 + sum(columns.shape[1] for columns in self._columns[:-1])
        joint = self._joint[-1].gather(1, best) if self._static else scores
        self._rows = best + before, joint, scores
        return best // self._width, self._columns[-1].gather(1, best)

    def whole(
        self, root: torch.Tensor, nodes: int, tables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, parents and joint log probabilities of the best nodes, [B, K], likeliest first after the root.

        No candidate is better than its parent, so every parent is there too.

        root: tokens [B, 1].   tables: the token of each column is the last one; if there are none, it is the column.
        """
        columns, parents, joint = (torch.cat(levels, dim=1) for levels in (self._columns, self._parents, self._joint))
        order = (torch.cat(self._scores, dim=1) if self._static else joint).topk(nodes - 1, -1).indices
        if self._static:
            order = order.gather(1, joint.gather(1, order).topk(nodes - 1, -1).indices)
        tokens, parents, joint = ordered_tree(root, columns, parents, joint, order)
        if tables:
            tokens = torch.cat([root, tracing.take(tables[-1], tokens[:, 1:])], dim=1)
        return tokens, parents, joint
