"""Optimisers: Muon for hidden matrices with AdamW for embeddings and gains, or Adam or AdamW for all.

Muon (Jordan et al., 2024) replaces each matrix's momentum by its nearest orthogonal matrix, which a quintic
Newton-Schulz iteration finds. torch's Muon iterates matrix by matrix in bf16. This one uses fp32 and one batched
product for all matrices of a shape, several times faster on CPUs without bf16 instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from redraft.train.config import Recipe

# Quintic coefficients, five steps: Jordan et al., "Muon".
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Return the nearest (semi-)orthogonal matrices [N, R, C], with singular values between about 0.7 and 1.2."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT  # [N, r, r], r the smaller side
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; step length sqrt(max(1, rows / columns)) times the learning rate."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        """All parameters must be matrices."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient once."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonalise(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)  # Nesterov


class Optimizers:
    """Optimisers behind one `step`."""

    def __init__(
        self, parts: Sequence[tuple[torch.optim.Optimizer, float]], clipped: Sequence[nn.Parameter], recipe: Recipe
    ) -> None:
        """Each part with its learning rate. The recipe's `grad_clip` bounds the gradients of `clipped`."""
        self._parts = [part for part, _ in parts]
        self._base = [lr for _, lr in parts]
        self._clipped = list(clipped)
        self._clip, self._by_value = recipe.grad_clip, recipe.clip_by == "value"

    def step(self, lr_factor: float) -> None:
        """Update with every learning rate times `lr_factor`, and drop the gradients."""
        if self._by_value:
            nn.utils.clip_grad_value_(self._clipped, self._clip)
        else:
            nn.utils.clip_grad_norm_(self._clipped, self._clip)
        for part, base in zip(self._parts, self._base, strict=True):
            for group in part.param_groups:
                group["lr"] = base * lr_factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every part."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the result of `state_dict`."""
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


Named = Iterable[tuple[str, nn.Parameter]]


def optimizers_for(named: Named, recipe: Recipe) -> Optimizers:
    """Return the recipe's optimisers over parameters with their names."""
    if recipe.optimizer == "muon":
        return _muon(named, recipe)
    parameters, betas = [parameter for _, parameter in named], (recipe.betas[0], recipe.betas[1])
    if recipe.optimizer == "adam":
        adam: torch.optim.Optimizer = torch.optim.Adam(parameters, recipe.lr, betas)
    else:
        adam = torch.optim.AdamW(parameters, recipe.lr, betas, weight_decay=recipe.weight_decay)
    return Optimizers([(adam, recipe.lr)], parameters, recipe)


def _muon(named: Named, recipe: Recipe) -> Optimizers:
    """Return Muon and AdamW. Clip only AdamW's gradients: Muon's step does not depend on the gradient's length."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        is_matrix = parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = Muon(matrices, recipe.matrix_lr, recipe.momentum, recipe.weight_decay)
    adam = torch.optim.AdamW(others, lr=recipe.embedding_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return Optimizers([(muon, recipe.matrix_lr), (adam, recipe.embedding_lr)], others, recipe)
