"""Token-info sampling and resampling (Lyanna, Algorithms 1 and 2), node by node in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redraft.export.drafters.level_tree import CERTAIN, IMPOSSIBLE, LESS
from redraft.methods.chains import DRAWN_LOG_PROB

Floats = NDArray[np.float32]
Added = Callable[[int], Floats]
"""Returns the numbers that a token adds to the next token's logits, [H]."""


@dataclass(frozen=True)
class Tree:
    """A tree by node: tokens or columns, parents (-1 for the root) and joint log probabilities."""

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]

    def top_nodes(self, nodes: int) -> Tree:
        """Return the `nodes` most probable nodes in order, root included (ties: the earlier), parents renumbered."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.log_probs[node])[:nodes]
        place = {node: index for index, node in enumerate(order)} | {-1: -1}
        return Tree(
            [self.tokens[node] for node in order],
            [place[self.parents[node]] for node in order],
            [self.log_probs[node] for node in order],
        )


def build_subtree(
    step_logits: Floats, root: int, added: Added, width: int, scale: float = 1.0,
    vocabulary: NDArray[np.int64] | None = None, drawn: bool = False,
) -> Tree:  # fmt: skip
    """Build the whole tree of Algorithm 1: step_logits [S, H] to `whole_tree(S, width)` nodes.

    scale: factor on logits and token information.   vocabulary: token of each column [H]; None if they are the same.
    drawn: log probabilities are those of ranks.
    """
    tree = Tree([root], [-1], [0.0])
    going_on = [0]
    for logits in step_logits:
        level: list[int] = []
        for node in going_on:
            log_probs = _log_softmax((logits + added(tree.tokens[node])) * np.float32(scale))
            for rank, column in enumerate(np.argsort(-log_probs, kind="stable")[:width].tolist()):
                log_prob = _rank_log_probs(width)[rank] if drawn else float(log_probs[column])
                level.append(len(tree.tokens))
                tree.tokens.append(column if vocabulary is None else int(vocabulary[column]))
                tree.parents.append(node)
                above = tree.log_probs[node]
                tree.log_probs.append(max(min(above + log_prob, above * LESS + CERTAIN), IMPOSSIBLE))
        going_on = sorted(level, key=lambda node: -tree.log_probs[node])[:width]
    return tree


def resample(
    chain_logits: Floats, first_step: int, token: int, added: Added, width: int, threshold: int, scale: float = 1.0,
    vocabulary: NDArray[np.int64] | None = None,
) -> Tree:  # fmt: skip
    """Build Algorithm 2's tree of the steps after `first_step` of chain_logits [N, H], or a root if too few remain."""
    remaining = chain_logits[first_step:]
    if len(remaining) <= threshold:
        return Tree([token], [-1], [0.0])
    return build_subtree(remaining, token, added, width, scale, vocabulary)


def _rank_log_probs(width: int) -> list[float]:
    return [DRAWN_LOG_PROB * (rank + 1) for rank in range(width)]


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), dtype=np.float32)
