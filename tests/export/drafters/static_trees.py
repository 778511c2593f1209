"""How sequences sample, and the static tree of heads' candidates as Python walks it, node by node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from redraft.methods.static_tree import Node
from redraft.noise_spec import DRAWN

CERTAIN = -(2.0**-20)
"""Largest log probability of a candidate."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence samples: its logit scale and temperature, its seed, and whether candidates are drawn."""

    scale: float
    temperature: float = 0.0
    seed: int = 0
    drawn: bool = False

    @property
    def stream(self) -> int:
        return DRAWN if self.drawn else 0


def expected_tree(
    tree: Iterable[Node], vocabulary: np.ndarray, root: int, z: torch.Tensor, drawn: bool
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and joint log probabilities of the static tree over scaled, noisy logits [N, H].

    vocabulary: the token of each column.
    """
    log_probs, ranked = z.log_softmax(-1), z.argsort(-1, descending=True)
    nodes = {}
    for path in tree:
        parent = nodes[path[:-1]][1] if len(path) > 1 else 0.0
        column = int(ranked[len(path) - 1, path[-1]])
        added = min(float(log_probs[len(path) - 1, column]), CERTAIN)
        nodes[path] = int(vocabulary[column]), parent + added
    order = list(nodes) if drawn else sorted(nodes, key=lambda path: -nodes[path][1])
    places = {(): 0, **{path: place for place, path in enumerate(order, 1)}}
    return (
        [root, *(nodes[path][0] for path in order)],
        [-1, *(places[path[:-1]] for path in order)],
        [0.0, *(nodes[path][1] for path in order)],
    )


GREEDY, NOISY, DRAWS = Sampling(1.3), Sampling(0.7, 1.4, seed=1), Sampling(1 / 0.8, 0.8, seed=5, drawn=True)
