"""Optimisers: Muon for hidden matrices with AdamW for embeddings and gains, or Adam in one of three forms for all.

Muon (Jordan et al., 2024) replaces each matrix's momentum by its nearest orthogonal matrix, which a quintic
Newton-Schulz iteration finds. torch's Muon iterates matrix by matrix in bf16. This one uses fp32 and one batched
product for all matrices of a shape, several times faster on CPUs without bf16 instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
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


_CALLS = 50
"""Calls of a linear map over which the mean square of its inputs is averaged."""
_LEAST_RMS = 1e-3


class InputScaledAdam(torch.optim.Adam):
    """Adam whose step of a linear map's weight [R, C] is divided, column by column, by the rms of the input.

    Adam moves all weights alike, so an input 200 times as large as the others moves the output 200 times as far,
    and small inputs learn nothing meanwhile. Here all inputs move the output alike. Biases and gains step as in Adam.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], modules: Iterable[nn.Module]
    ) -> None:
        """modules: those that compute with `params`; inputs of the linear maps among them are measured from now on."""
        super().__init__(list(params), lr, betas)
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self._maps = [one for one in modules if isinstance(one, nn.Linear) and id(one.weight) in own]
        self._squares = [torch.ones(one.in_features, device=one.weight.device) for one in self._maps]
        self._calls = [0] * len(self._maps)
        for index, one in enumerate(self._maps):
            one.register_forward_pre_hook(partial(self._measure, index))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient once."""
        before = [one.weight.clone() for one in self._maps]
        super().step()
        for one, old, squares in zip(self._maps, before, self._squares, strict=True):
            one.weight.copy_(torch.addcdiv(old, one.weight - old, squares.sqrt().clamp(min=_LEAST_RMS)))

    def _measure(self, index: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        self._calls[index] = min(self._calls[index] + 1, _CALLS)
        rows = inputs[0].detach().flatten(0, -2).float()
        self._squares[index].lerp_(rows.square().mean(0), 1 / self._calls[index])

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state and the measured inputs."""
        return {**super().state_dict(), "squares": list(self._squares), "calls": list(self._calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        for own, kept in zip(self._squares, state_dict["squares"], strict=True):
            own.copy_(kept)
        self._calls = list(state_dict["calls"])


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


def optimizers_for(named: Named, recipe: Recipe, modules: Iterable[nn.Module] = ()) -> Optimizers:
    """Return the recipe's optimisers over parameters with their names. modules: those that compute with them."""
    if recipe.optimizer == "muon":
        return _muon(named, recipe)
    parameters, betas = [parameter for _, parameter in named], (recipe.betas[0], recipe.betas[1])
    if recipe.optimizer == "scaled_adam":
        adam: torch.optim.Optimizer = InputScaledAdam(parameters, recipe.lr, betas, modules)
    elif recipe.optimizer == "adam":
        adam = torch.optim.Adam(parameters, recipe.lr, betas)
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
