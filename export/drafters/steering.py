"""Steering: a vector of the verifier's hidden states biases each MLP of a decoder.

Berdoz et al. 2025 (SD²), appendix A.4. With h, m and l the verifier's hidden states after a high, a middle and a low
layer, a an MLP's input, and σ its activation:

    g = W_hml [h ; m ; l]
    MLP(a) = W_d (W_u a ⊙ σ(W_g a))                   Eq. 1
    MLP(a, g) = W_d ((W_u a + W_s g) ⊙ σ(W_g a))      Eq. 2

Each layer has a W_s of its own. `Steering.bias` has them all, one below the other. The sum is a hook of transformers'
own up projection, so that any architecture with such an MLP can be steered. Initially W_s is 0, and g is h + m + l.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from redraft.errors import UnsupportedModelError
from redraft.export.graph import tracing

_UP, _GATE, _DOWN = "up_proj", "gate_proj", "down_proj"
_CURRENT: ContextVar[Sequence[torch.Tensor] | None] = ContextVar("redraft_biases", default=None)


class Steering(nn.Module):
    """Biases of all layers from hidden states. sizes: outputs of each layer's up projection."""

    def __init__(self, hidden_size: int, states: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.vector = nn.Linear(states * hidden_size, hidden_size, bias=False)  # W_hml
        self.bias = nn.Linear(hidden_size, sum(sizes), bias=False)  # W_s of every layer
        with torch.no_grad():
            self.vector.weight.copy_(torch.eye(hidden_size).repeat(1, states))
            self.bias.weight.zero_()

    def forward(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return biases [B, T, S] of rows at `positions` [B, T], S numbers for all layers.

        features: [B, T, states * n], the verifier's hidden states at an earlier position than the row's, highest layer
        first. No position is before 0, so the bias of that row is 0.
        """
        biases: torch.Tensor = self.bias(self.vector(features))
        return biases.masked_fill(positions[..., None] == 0, 0.0)

    @contextmanager
    def applied(self, biases: torch.Tensor) -> Iterator[None]:
        """Add biases [B, T, S] to the up projections of the decoder that `steer` prepared, inside of a `with`."""
        ends = accumulate(self.sizes)  # slices, since TensorRT's parser takes no SplitToSequence
        parts = [biases[..., end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
        token = _CURRENT.set(tuple(parts))
        try:
            yield
        finally:
            _CURRENT.reset(token)


class SteerGraph(nn.Module):
    """The computation of the graph `steer`, with inputs and outputs in the order of `steer_inputs`, `steer_outputs`."""

    def __init__(self, steering: Steering) -> None:
        super().__init__()
        self.steering = steering

    def forward(
        self, features: list[torch.Tensor], positions: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        biases = self.steering(torch.cat(features, dim=-1), positions)
        return biases, tracing.gather_rows(biases, last)


def steer(decoder: nn.Module, layers: int) -> tuple[int, ...]:
    """Prepare the MLPs of a decoder with so many layers for `Steering.applied`. Returns the sizes of their biases.

    decoder: transformers' model without its head. Raises UnsupportedModelError naming an MLP without an up projection
    next to a gate.
    """
    stack = next(module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == layers)
    projections = [_up_projection(number, layer) for number, layer in enumerate(stack)]
    for number, projection in enumerate(projections):
        projection.register_forward_hook(_adding(number))
    return tuple(projection.out_features for projection in projections)


def _adding(number: int) -> Any:
    def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        biases = _CURRENT.get()
        return output if biases is None else output + biases[number]

    return add


def _up_projection(number: int, layer: nn.Module) -> nn.Linear:
    """Return the up projection of a layer's gated MLP, which must be a child of the layer."""
    for child in layer.children():
        found = [getattr(child, name, None) for name in (_UP, _GATE, _DOWN)]
        if isinstance(found[0], nn.Linear) and all(isinstance(projection, nn.Linear) for projection in found):
            return found[0]
    named = [child for name, child in layer.named_children() if any(word in name for word in ("mlp", "ffn", "feed"))]
    raise UnsupportedModelError(
        f"layer {number} takes no steering: {type((*named, layer)[0]).__name__} has no {_UP} next to a {_GATE}",
        "choose a drafter whose layers have gated MLPs with an up projection of their own, as Llama's",
    )
