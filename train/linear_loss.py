"""Cross-entropy of a large product with few targets a row, without keeping the product.

The logits of a batch, one row a draft and one column a token of the draft vocabulary, are hundreds of megabytes; every
pass over them costs as much as the product. Here they exist for a few rows at a time, which stay in the processor's
cache, and forward computes the gradient at once (as in Liger Kernel's fused linear cross-entropy, arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

_ROWS = 512


@dataclass(frozen=True)
class LinearLoss:
    """loss: scalar with a gradient.   Without one: log_sum [M] of every row's logits, chosen [M, K] logits of the
    targets' columns, largest [M] logit."""

    loss: torch.Tensor
    log_sum: torch.Tensor
    chosen: torch.Tensor
    largest: torch.Tensor


def linear_cross_entropy(
    states: torch.Tensor, head: torch.Tensor, own_states: torch.Tensor, own_head: torch.Tensor,
    columns: torch.Tensor, weights: torch.Tensor,
) -> LinearLoss:  # fmt: skip
    """Return the sum over rows m and targets k of weights[m, k] · −log softmax(l_m)[columns[m, k]].

    l = states · headᵀ + own_states · own_headᵀ. `head` [H, n] is frozen; gradients are for states [M, n],
    own_states [M, d] and own_head [H, d], all of one type. columns: int64 [M, K].   weights: float [M, K].
    """
    found = _LinearLoss.apply(states, head, own_states, own_head, columns, weights)  # type: ignore[no-untyped-call]
    return LinearLoss(*found)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, head: torch.Tensor, own_states: torch.Tensor, own_head: torch.Tensor,
        columns: torch.Tensor, weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        totals = weights.sum(-1)
        grads = torch.empty_like(states), torch.empty_like(own_states), torch.zeros_like(own_head, dtype=torch.float32)
        log_sum, largest, chosen = torch.empty_like(totals), torch.empty_like(totals), torch.empty_like(weights)
        needed = any(ctx.needs_input_grad)
        for begin in range(0, len(states), _ROWS):
            rows = slice(begin, begin + _ROWS)
            logits = (F.linear(states[rows], head) + F.linear(own_states[rows], own_head)).float()
            chosen[rows], largest[rows] = logits.gather(1, columns[rows]), logits.amax(-1)
            log_probs = F.log_softmax(logits, -1)
            log_sum[rows] = logits[:, 0] - log_probs[:, 0]
            if needed:
                gradient = log_probs.exp_().mul_(totals[rows, None]).scatter_add_(1, columns[rows], -weights[rows])
                gradient = gradient.to(head.dtype)
                grads[0][rows], grads[1][rows] = gradient @ head, gradient @ own_head
                grads[2].add_(gradient.mT @ own_states[rows])
        ctx.save_for_backward(grads[0], grads[1], grads[2].to(own_head.dtype))
        loss = (totals * log_sum).sum() - (weights * chosen).sum()
        ctx.mark_non_differentiable(log_sum, chosen, largest)
        return loss, log_sum, chosen, largest

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, own_states, own_head = (grad * outputs[0].to(grad.dtype) for grad in ctx.saved_tensors)
        return states, None, own_states, own_head, None, None
