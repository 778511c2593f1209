"""Steering: a vector of the verifier's hidden states biases each layer of a decoder.

Berdoz et al. 2025 (SD²), appendix A.4. With h, m and l the verifier's hidden states after a high, a middle and a low
layer, a an MLP's input, and σ its activation:

    g = W_hml [h ; m ; l]
    MLP(a) = W_d (W_u a ⊙ σ(W_g a))                   Eq. 1
    MLP(a, g) = W_d ((W_u a + W_s g) ⊙ σ(W_g a))      Eq. 2

The authors' program normalizes g by LayerNorm before W_s (`norm`). The `Mechanism` is Eq. 2 or an ablation of the paper
(appendix A.6, Figure 4), with f^(l) the output of layer l:

    up           Eq. 2
    after        f^(l) := f^(l) + W_s g                              "Inv. bias after MLP"
    conditional  Eq. 2 with W_2 GELU(W_f N(f^(l-1)) + W_s g)         "Cond. bias in MLP"
                 in place of W_s g

N is the layer's norm before its attention, whose output the authors' program reads. Each layer has matrices of its own.
`Steering.bias` has W_s of all layers, one below the other: it reads g alone, so one product serves a whole draft. The
sums are hooks of transformers' own modules, so that any architecture with them can be steered. Initially g is
h + m + l, and W_s is 0, or W_2 if conditional.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from redraft.errors import UnsupportedModelError
from redraft.export.graph import tracing

Mechanism = Literal["up", "after", "conditional"]
"""The place where g enters a layer."""
_UP, _GATE, _DOWN, _NORM = "up_proj", "gate_proj", "down_proj", "input_layernorm"


class Steering(nn.Module):
    """Biases of all layers from hidden states.

    widths: of each layer's sum, as `steer` returns them.   sizes: numbers of W_s g for each layer.
    """

    def __init__(
        self, hidden_size: int, states: int, widths: Sequence[int], mechanism: Mechanism = "up", norm: bool = False
    ) -> None:
        super().__init__()
        conditional = widths if mechanism == "conditional" else ()
        self.sizes = tuple(hidden_size for _ in widths) if conditional else tuple(widths)
        self.vector = nn.Linear(states * hidden_size, hidden_size, bias=False)  # W_hml
        self.norm: nn.Module = nn.LayerNorm(hidden_size) if norm else nn.Identity()
        self.bias = nn.Linear(hidden_size, sum(self.sizes), bias=False)  # W_s of every layer
        self.inner = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in conditional)  # W_f
        self.outer = nn.ModuleList(nn.Linear(hidden_size, width, bias=False) for width in conditional)  # W_2
        bound = (2 * hidden_size) ** -0.5 if conditional else 0.0  # W_s and W_f are one linear map of 2n inputs
        with torch.no_grad():
            self.vector.weight.copy_(torch.eye(hidden_size).repeat(1, states))
            for weight in (self.bias.weight, *self.inner.parameters()):
                weight.uniform_(-bound, bound)
            for weight in self.outer.parameters():
                weight.zero_()

    def forward(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return W_s g of all layers, [B, T, S], for rows at `positions` [B, T].

        features: [B, T, states * n], the verifier's hidden states at an earlier position than the row's, highest layer
        first. No position is before 0, so W_s g of that row is 0.
        """
        biases: torch.Tensor = self.bias(self.norm(self.vector(features)))
        return biases.masked_fill(positions[..., None] == 0, 0.0)

    @contextmanager
    def applied(self, biases: torch.Tensor) -> Iterator[None]:
        """Steer the decoder that `steer` prepared, inside of a `with`.   biases: [B, T, S], of `forward`."""
        ends = accumulate(self.sizes)  # slices, since TensorRT's parser takes no SplitToSequence
        parts = [biases[..., end - size : end] for size, end in zip(self.sizes, ends, strict=True)]
        token = _CURRENT.set(_Applied(self, tuple(parts), list(parts)))
        try:
            yield
        finally:
            _CURRENT.reset(token)


@dataclass(frozen=True)
class _Applied:
    """A pass of a decoder.   parts: W_s g by layer.   added: what each layer adds; `condition` replaces it."""

    steering: Steering
    parts: tuple[torch.Tensor, ...]
    added: list[torch.Tensor]

    def condition(self, number: int, rows: torch.Tensor) -> None:
        """Compute what layer `number` adds.   rows: N(f^(l-1)), [B, T, n]."""
        inner, outer = self.steering.inner[number], self.steering.outer[number]
        self.added[number] = outer(F.gelu(inner(rows) + self.parts[number]))


_CURRENT: ContextVar[_Applied | None] = ContextVar("redraft_steering", default=None)


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


def steer(decoder: Any, layers: int, mechanism: Mechanism = "up") -> tuple[int, ...]:
    """Prepare the layers of a decoder with so many layers for `Steering.applied`. Returns the widths of their sums.

    decoder: transformers' model without its head. Raises UnsupportedModelError naming a layer without an up projection
    next to a gate, or if conditional without a norm before its attention. `after` takes any layer.
    """
    stack = next(module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == layers)
    if mechanism == "after":
        for number, layer in enumerate(stack):
            layer.register_forward_hook(_adding(number))
        return (int(decoder.config.hidden_size),) * layers
    projections = [_up_projection(number, layer) for number, layer in enumerate(stack)]
    for number, projection in enumerate(projections):
        projection.register_forward_hook(_adding(number))
    if mechanism == "conditional":
        for number, layer in enumerate(stack):
            _norm(number, layer).register_forward_hook(_conditioning(number))
    return tuple(projection.out_features for projection in projections)


def _adding(number: int) -> Any:
    def add(module: nn.Module, inputs: Any, output: Any) -> Any:
        current = _CURRENT.get()
        if current is None:
            return output
        if isinstance(output, tuple):  # some layers return their attention's weights too
            return (output[0] + current.added[number], *output[1:])
        return output + current.added[number]

    return add


def _conditioning(number: int) -> Any:
    def condition(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if (current := _CURRENT.get()) is not None:
            current.condition(number, output)

    return condition


def _norm(number: int, layer: nn.Module) -> nn.Module:
    """Return the norm before a layer's attention."""
    found = getattr(layer, _NORM, None)
    if isinstance(found, nn.Module):
        return found
    raise UnsupportedModelError(
        f"layer {number} takes no conditional steering: {type(layer).__name__} has no {_NORM}",
        "choose another steering, up or after, or a drafter whose layers begin with a norm, as Llama's",
    )


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
