"""Single operators for modules of many operators: RMS normalization and rotary embedding.

A replacement must agree with its module on random numbers. Other modules are exported unchanged.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import torch
from onnxscript.onnx_opset import opset24 as op
from torch import nn

PROBE_ERROR = 1e-5
"""Largest difference between a module and its replacement, relative to the largest value."""


@torch.library.custom_op("redraft::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("redraft::rotary", mutates_args=())
def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, heads: int, rotated: int
) -> torch.Tensor:
    """Rotate halves (not interleaved) of each head: x [B, T, heads * D], cos and sin [P, R / 2], positions [B, T].

    Rotates the first R of a head's D components (RoFormer, §3.2.2) and keeps the rest. `rotated` is R, or 0 to rotate
    all.
    """
    batch, nodes, _ = x.shape
    half = cos.shape[1]
    split = x.view(batch, nodes, heads, -1)
    first, second, kept = split[..., :half], split[..., half : 2 * half], split[..., 2 * half :]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    turned = torch.cat([first * c - second * s, second * c + first * s, kept], -1)
    return turned.reshape(batch, nodes, -1)


@rotary.register_fake
def _(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, heads: int, rotated: int
) -> torch.Tensor:
    return torch.empty_like(x)


def emit_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Translation for `torch.onnx.export`."""
    return op.RMSNormalization(x, weight, axis=-1, epsilon=eps)


def emit_rotary(x: Any, cos: Any, sin: Any, positions: Any, heads: int, rotated: int) -> Any:
    """Translation for `torch.onnx.export`."""
    return op.RotaryEmbedding(x, cos, sin, positions, num_heads=heads, rotary_embedding_dim=rotated)


class SingleRmsNorm(nn.Module):
    """RMS normalization as one operator; the architecture adds `offset` to the stored gain (1 in Gemma)."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last axis."""
        gain = self.weight + self.offset if self.offset else self.weight
        normed: torch.Tensor = rms_norm(x, gain, self.eps)
        return normed


def replace_rms_norms(model: nn.Module) -> None:
    """Replace every module with one gain that proves to be an RMS normalization by `SingleRmsNorm`."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if "norm" in type(child).__name__.lower() and (single := _as_rms_norm(child)) is not None:
                setattr(parent, name, single)


def _as_rms_norm(module: nn.Module) -> SingleRmsNorm | None:
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = parameters["weight"]
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module, {id(weight): nn.Parameter(torch.randn(len(weight), generator=generator))})
    x = torch.randn(3, len(weight), generator=generator)
    for offset in (0.0, 1.0):
        single = SingleRmsNorm(probe.weight, eps, offset)  # type: ignore[arg-type]
        if _agree(probe(x), single(x)):
            return SingleRmsNorm(weight, eps, offset)
    return None


def fix_rotary_lengths(model: nn.Module) -> None:
    """Keep the initial frequencies of rotary modules. `support.check_rope` refuses texts that would change them."""
    for module in model.modules():
        forward = type(module).forward
        replaced = "forward" in vars(module)
        if not replaced and hasattr(module, "rope_type") and (plain := inspect.unwrap(forward)) is not forward:
            module.forward = MethodType(torch.no_grad()(plain), module)


class RotaryTables:
    """Cosines and sines of every position, computed by the model's own rotary module, and the modules that use them."""

    def __init__(self, module: nn.Module, positions: int, layer_type: str | None) -> None:
        extra = () if layer_type is None else (layer_type,)
        cos, sin = module(torch.zeros(1, 1), torch.arange(positions)[None], *extra)
        self.cos, self.sin = cos[0], sin[0]  # [P, R]
        self.half_cos, self.half_sin = (t[:, : t.shape[1] // 2].contiguous() for t in (self.cos, self.sin))

    def rotates_halves(self, apply: Callable[..., Any]) -> bool:
        """Return True if `apply(q, k, cos, sin)` equals the result of `rotary` from these tables."""
        generator = torch.Generator().manual_seed(0)
        rows = min(len(self.cos), 5)
        q = torch.randn(1, 2, rows, self.cos.shape[1], generator=generator)
        try:
            expected, _ = apply(q, q, self.cos[None, :rows], self.sin[None, :rows])
        except (RuntimeError, TypeError):  # another layout of the tables, or another signature
            return False
        flat = q.transpose(1, 2).reshape(1, rows, -1)
        found = rotary(flat, self.half_cos, self.half_sin, torch.arange(rows)[None], 2, 0)
        return _agree(expected.transpose(1, 2).reshape(1, rows, -1), found)


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    return bool((expected - found).abs().max() <= PROBE_ERROR * expected.abs().max())


@contextmanager
def single_rotary(model: nn.Module, max_positions: int) -> Iterator[None]:
    """Within the context, the model rotates by `redraft::rotary` over precomputed tables, if the result is the same.

    It is the same if the model uses its rotary module's cosines and sines unchanged. Otherwise, or if the model rotates
    by another function, its own code is traced.
    """
    module = getattr(model.base_model, "rotary_emb", None)
    source = sys.modules[type(model).__module__]
    apply = getattr(source, "apply_rotary_pos_emb", None)
    with ExitStack() as stack:
        if module is not None and apply is not None and not hasattr(module, "layer_types"):
            tables = RotaryTables(module, max_positions, None)
            if tables.rotates_halves(apply):
                model.register_buffer("rotary_cos", tables.half_cos.to(model.dtype), persistent=False)
                model.register_buffer("rotary_sin", tables.half_sin.to(model.dtype), persistent=False)
                latest = _Latest(module.forward)
                stack.enter_context(mock.patch.object(module, "forward", latest))
                stack.enter_context(mock.patch.object(source, "apply_rotary_pos_emb", _apply_by(model, latest, apply)))
        yield


class _Latest:
    """A rotary module's forward pass that stores its latest positions and results."""

    def __init__(self, forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._forward = forward
        self.positions: torch.Tensor | None = None
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.positions, self.given = position_ids, self._forward(x, position_ids)
        return self.given

    def returned(self, cos: Any, sin: Any) -> bool:
        """Return True if these are the tensors that the latest call returned."""
        return self.given is not None and cos is self.given[0] and sin is self.given[1]


def _apply_by(model: Any, latest: _Latest, own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1 or not latest.returned(cos, sin):
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        turned = []
        for x in (q, k):
            batch, heads, nodes, size = x.shape
            flat = x.transpose(1, 2).reshape(batch, nodes, heads * size)
            rotated = 2 * model.rotary_cos.shape[1]
            part = rotated if rotated < size else 0
            assert latest.positions is not None
            flat = rotary(flat, model.rotary_cos, model.rotary_sin, latest.positions, heads, part)
            turned.append(flat.view(batch, nodes, heads, size).transpose(1, 2))
        return turned[0], turned[1]

    return apply
