"""The product of a drafter's states with rows of the verifier's head, whole or factorized.

The whole product has H n numbers, more than all else in a draft. With a rank r, for states x and the head W [H, n]:

    scores = L (R x),  L [H, r], R [r, n]
    logits = W x for the CANDIDATES tokens of the largest scores, the scores for others

That is SVD-softmax (Shim et al., NIPS 2017, section 3), whose preview is the scores and whose full view is W x.
EAGLE-4's candidate head does the same for drafts alone, with factors that are trained.

L R is the matrix of rank r with the least E |(W - L R) x|² over the verifier's own states, C = E x xᵀ. The plain SVD
of W has the least |W - L R|, as if all states were equally likely: it finds a fifth of the best tokens, and this one
nine tenths (docs/log.md). With the eigenvectors V of the r largest eigenvalues of C½ Wᵀ W C½:

    L = W C½ V,  R = Vᵀ C^-½

All of it needs matrices of n x n numbers only.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from redraft.errors import UsageError
from redraft.export.checkpoint.sources import AnySource, FactoredSource

CANDIDATES = 128
"""Tokens of a row whose logits are exact."""
_LEAST = 1e-6
"""Least eigenvalue of C as a share of the largest, for a finite inverse. Fewer states than n leave some at zero."""


class DraftHead(nn.Module):
    """The head for the H tokens of a draft vocabulary, without values.

    weight: W [H, n].   left, right: L [H, r] and R [r, n], None without a rank.
    """

    weight: nn.Parameter
    left: nn.Parameter | None
    right: nn.Parameter | None

    def __init__(self, tokens: int, hidden: int, rank: int, dtype: torch.dtype) -> None:
        """tokens: H.   hidden: n.   rank: r, 0 for a whole product."""
        super().__init__()
        sizes = {"weight": (tokens, hidden), "left": (tokens, rank), "right": (rank, hidden)}
        for name, size in sizes.items():
            value = torch.empty(size, dtype=dtype) if rank or name == "weight" else None
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, H] of states [B, T, n]."""
        if self.left is None or self.right is None:
            return F.linear(states, self.weight)
        scores = F.linear(F.linear(states, self.right), self.left)
        candidates = scores.topk(min(CANDIDATES, len(self.weight)), -1).indices  # [B, T, C]
        exact = F.embedding(candidates, self.weight) @ states[..., None]  # [B, T, C, 1]
        return scores.scatter(-1, candidates, exact.squeeze(-1))


def check_rank(drafter: str, rank: int, hidden: int) -> None:
    """Raise UsageError for a rank that saves nothing."""
    if rank >= hidden:
        raise UsageError(
            f"drafter {drafter}: head_rank must be below {hidden}, the numbers of a hidden state, not {rank}",
            "128 is usual",
        )


def check_verifiers(drafter: str, rank: int | None, head: str) -> None:
    """Raise UsageError for a rank of a head that is not the verifier's.   head: what it is, in words."""
    if rank is not None:
        raise UsageError(f"drafter {drafter}: head_rank is for the verifier's head, not for {head}", "leave it out")


def factored(
    head: AnySource, parameter: str, rank: int, prefix: str, second_moment: NDArray[np.float64] | None
) -> FactoredSource:
    """Return the factors of a head's rows as parameters `prefix`left and `prefix`right.

    second_moment: C [n, n] of the verifier's states; None for a verifier with random weights, whose W has a plain SVD.
    """
    hidden = head.parameters[parameter][1]
    gram = np.zeros((hidden, hidden))
    for rows in head.slabs(parameter):
        gram += rows.T @ rows
    basis, right = fitted(gram, rank, np.eye(hidden) if second_moment is None else second_moment)
    return FactoredSource(head, parameter, prefix, basis, right)


def fitted(
    gram: NDArray[np.float64], rank: int, second_moment: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return C½ V [n, r] and R [r, n], the largest singular value first.   gram: Wᵀ W.   second_moment: C."""
    root, inverse = _roots(second_moment)
    vectors = np.linalg.eigh(root @ gram @ root)[1][:, : -rank - 1 : -1]
    return (root @ vectors).astype(np.float32), (vectors.T @ inverse).astype(np.float32)


def _roots(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the square root of a symmetric matrix, and the root's inverse."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.sqrt(np.maximum(values, _LEAST * values[-1]))
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
