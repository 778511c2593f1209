"""Mixtures of experts with separate products for each expert, so that each reads its own checkpoint tensors.

transformers keeps all experts of a layer in one tensor and describes its layout by flags
(`use_experts_implementation`). Every expert runs on every token and is weighted by its router probability, zero if the
router did not choose it. A tree of a few nodes touches nearly all experts, and a graph without data-dependent shapes is
the same in every backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from redraft.export.checkpoint.stored_tensor import StoredTensor, narrow, select

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


class UnrolledExperts(nn.Module):
    """The experts of a layer, one module each. They keep only the functions of `fused`, transformers' module."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        count = len(fused.down_proj)
        standard = getattr(type(fused), "_apply_gate", None) is _default_apply_gate
        # Gate and up are then the halves of one stored matrix, multiplied after the activation.
        self.separate_gate = bool(fused.has_gate and standard and not fused.is_transposed and not fused.has_bias)
        shapes = {name: tuple(p.shape[1:]) for name, p in fused.named_parameters(recurse=False) if p.dim() == 3}
        if self.separate_gate:
            twice, width = shapes.pop("gate_up_proj")
            shapes = {"gate_proj": (twice // 2, width), "up_proj": (twice // 2, width), **shapes}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: _Product(shape, fused) for name, shape in shapes.items()}) for _ in range(count)
        )
        self.activation: Any = getattr(fused, "act_fn", None)
        self.norm = fused.post_expert_norm if fused.has_post_expert_norm else None
        self.__dict__["_gate"] = fused._apply_gate if fused.has_gate else None
        for name, _ in list(fused.named_parameters(recurse=False)):
            delattr(fused, name)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Apply the experts to x [N, n]. chosen, weights [N, k]: expert indices and their router weights."""
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = torch.where(chosen == index, weights, torch.zeros_like(weights)).sum(-1, keepdim=True)
            out = expert["down_proj"](self._hidden(expert, x))  # type: ignore[index]
            out = self.norm(out) if self.norm is not None else out
            total = total + (share * out).to(x.dtype)  # router weights may be fp32 if x is fp16 or bf16
        return total

    def _hidden(self, expert: Any, x: torch.Tensor) -> torch.Tensor:
        """The expert's inner activations."""
        gate: Any = self.__dict__["_gate"]
        hidden: torch.Tensor
        if self.separate_gate:
            hidden = self.activation(expert["gate_proj"](x)) * expert["up_proj"](x)
        else:
            hidden = self.activation(expert["up_proj"](x)) if gate is None else gate(expert["gate_up_proj"](x))
        return hidden


class _Product(nn.Module):
    """Computes x W^T + b, or x W + b if the weight is stored transposed."""

    def __init__(self, shape: tuple[int, ...], fused: Any) -> None:
        super().__init__()
        dtype = fused.down_proj.dtype
        outputs = shape[1] if fused.is_transposed else shape[0]
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if fused.has_bias else None
        self._transposed = fused.is_transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, in] to [N, out]."""
        out = x @ (self.weight if self._transposed else self.weight.T)
        return out if self.bias is None else out + self.bias


def unroll_experts(model: nn.Module) -> None:
    """Replace every module whose experts transformers computes through its experts interface."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if all(hasattr(child, flag) for flag in _FLAGS) and hasattr(child, "down_proj"):
                setattr(parent, name, UnrolledExperts(child))


def expert_tensors(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensors of all unrolled experts' parameters, by their names in `model`."""
    tensors: dict[str, StoredTensor] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, UnrolledExperts):
            continue
        for index, expert in enumerate(module.experts):
            for name, product in expert.items():  # type: ignore[operator]
                place = f"{prefix}.experts.{index}.{name}"
                if module.separate_gate and name in ("gate_proj", "up_proj"):
                    rows = len(product.weight)
                    begin = 0 if name == "gate_proj" else rows
                    fused = select(stored[f"{prefix}.gate_up_proj"], index)
                    tensors[f"{place}.weight"] = narrow(fused, begin, begin + rows)
                    continue
                tensors[f"{place}.weight"] = select(stored[f"{prefix}.{name}"], index)
                if product.bias is not None:
                    tensors[f"{place}.bias"] = select(stored[f"{prefix}.{name}_bias"], index)
    return tensors
