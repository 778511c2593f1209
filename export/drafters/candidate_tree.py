"""Trees of candidates in draft graphs: joint probabilities, and the order of a tree's nodes."""

from __future__ import annotations

import torch

CERTAIN, LESS = -(2.0**-20), 1 + 2.0**-22
"""A child's joint log probability is at most its parent's times LESS, plus CERTAIN. So float32 has it below its
parent's, however sure the drafter is. Which of equal numbers a TopK takes first is left to each library."""
IMPOSSIBLE = -1e30
"""The joint log probability of a node that does not count. Not -inf: ONNX Runtime's TopK on CUDA fills up its
rows with the smallest float32, which would come before it, with indices past the end."""


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
