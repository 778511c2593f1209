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
    targets' columns, largest [M] logit, aligned bool [M] (`Alignment`; all true without one)."""

    loss: torch.Tensor
    log_sum: torch.Tensor
    chosen: torch.Tensor
    largest: torch.Tensor
    aligned: torch.Tensor


@dataclass(frozen=True)
class Alignment:
    """A row is aligned if the column `truth` [M] is among its `k` largest logits. No row with truth -1 is.

    alone: True if only aligned rows count.
    """

    truth: torch.Tensor
    k: int
    alone: bool = True

    def of(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return which of these rows are aligned, bool [R], by their logits [R, H]."""
        truth = self.truth[rows]
        found = logits.gather(1, truth.clamp(min=0)[:, None])
        return (truth >= 0) & ((logits > found).sum(-1) < self.k)


@dataclass(frozen=True)
class Overlap:
    """Row m also loses weights[m] · Σ |p − q|, where q is its softmax, and p is `shares` [M, K] of the columns, else 0.

    Both sum up to 1, so the distance is 2 (1 − Σ min(p, q)). Its gradient is that of a cross-entropy in which the
    columns with q < p have the weights 2 q.
    """

    shares: torch.Tensor
    weights: torch.Tensor

    def pulls(self, probs: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return these rows' weights of that cross-entropy, [R, K], from their softmax at the columns [R, K]."""
        return 2 * self.weights[rows, None] * probs * (probs < self.shares[rows])

    def loss(self, probs: torch.Tensor) -> torch.Tensor:
        """Return every row's loss, [M], from the softmax at the columns [M, K]."""
        return 2 * self.weights * (1 - torch.minimum(probs, self.shares).sum(-1))


def linear_cross_entropy(  # noqa: PLR0913 - inputs of one autograd function
    states: torch.Tensor, head: torch.Tensor, own_states: torch.Tensor | None, own_head: torch.Tensor | None,
    columns: torch.Tensor, weights: torch.Tensor, alignment: Alignment | None = None, overlap: Overlap | None = None,
) -> LinearLoss:  # fmt: skip
    """Return the sum over rows m that count, and targets k, of weights[m, k] · −log softmax(l_m)[columns[m, k]].

    l = states · headᵀ + own_states · own_headᵀ, without the second product if its factors are None, and without the
    first if n is 0. `head` [H, n] is frozen; gradients are for states [M, n], own_states [M, d] and own_head [H, d],
    all of one type.
    columns: int64 [M, K].   weights: float [M, K].
    """
    arguments = states, head, own_states, own_head, columns, weights, alignment, overlap
    found = _LinearLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return LinearLoss(*found)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - inputs of one autograd function
        ctx: Any, states: torch.Tensor, head: torch.Tensor, own_states: torch.Tensor | None,
        own_head: torch.Tensor | None, columns: torch.Tensor, weights: torch.Tensor, alignment: Alignment | None,
        overlap: Overlap | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        totals = weights.sum(-1)
        aligned = torch.ones(len(states), dtype=torch.bool, device=states.device)
        own = None if own_states is None or own_head is None else _OwnProduct(own_states, own_head)
        gradients = torch.empty_like(states)
        log_sum, largest, chosen = torch.empty_like(totals), torch.empty_like(totals), torch.empty_like(weights)
        needed = any(ctx.needs_input_grad)
        for begin in range(0, len(states), _ROWS):
            rows = slice(begin, begin + _ROWS)
            logits = F.linear(states[rows], head)
            logits = (logits if own is None else logits + own.logits(rows)).float()
            chosen[rows], largest[rows] = logits.gather(1, columns[rows]), logits.amax(-1)
            counted, of_rows = weights[rows], totals[rows]
            if alignment is not None:
                aligned[rows] = alignment.of(logits, rows)
            if alignment is not None and alignment.alone:
                counted, of_rows = counted * aligned[rows, None], of_rows * aligned[rows]
            log_probs = F.log_softmax(logits, -1)
            log_sum[rows] = logits[:, 0] - log_probs[:, 0]
            if overlap is not None:
                pulls = overlap.pulls((chosen[rows] - log_sum[rows, None]).exp(), rows)
                counted, of_rows = counted + pulls, of_rows + pulls.sum(-1)
            if needed:
                gradient = log_probs.exp_().mul_(of_rows[:, None]).scatter_add_(1, columns[rows], -counted)
                gradient = gradient.to(head.dtype)
                gradients[rows] = gradient @ head
                if own is not None:
                    own.add(rows, gradient)
        ctx.save_for_backward(gradients, *(() if own is None else own.gradients()))
        of_rows = totals * log_sum - (weights * chosen).sum(-1)
        if overlap is not None:
            of_rows = of_rows + overlap.loss((chosen - log_sum[:, None]).exp())
        loss = (of_rows[aligned] if alignment is not None and alignment.alone else of_rows).sum()
        ctx.mark_non_differentiable(log_sum, chosen, largest, aligned)
        return loss, log_sum, chosen, largest, aligned

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, *own = (grad * outputs[0].to(grad.dtype) for grad in ctx.saved_tensors)
        own_states, own_head = own or (None, None)
        return states, None, own_states, own_head, None, None, None, None


class _OwnProduct:
    """own_states · own_headᵀ a few rows at a time, and its gradients."""

    def __init__(self, states: torch.Tensor, head: torch.Tensor) -> None:
        self._states, self._head = states, head
        self._of_states, self._of_head = torch.empty_like(states), torch.zeros_like(head, dtype=torch.float32)

    def logits(self, rows: slice) -> torch.Tensor:
        """Return the product for these rows."""
        return F.linear(self._states[rows], self._head)

    def add(self, rows: slice, gradient: torch.Tensor) -> None:
        """Take the gradient of these rows' logits."""
        self._of_states[rows] = gradient @ self._head
        self._of_head.add_(gradient.mT @ self._states[rows])

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of states and head."""
        return self._of_states, self._of_head.to(self._head.dtype)
