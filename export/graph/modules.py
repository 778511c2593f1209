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


rms_norm.register_fake(lambda x, *_: torch.empty_like(x))


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
    first, second, rest = split[..., :half], split[..., half : 2 * half], split[..., 2 * half :]
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    turned = torch.cat([first * c - second * s, second * c + first * s, rest], -1)
    return turned.reshape(batch, nodes, -1)


rotary.register_fake(lambda x, *_: torch.empty_like(x))


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
    """Keep the initial frequencies of rotary modules. `check_rope` refuses texts that would change them."""
    for module in model.modules():
        forward = type(module).forward
        replaced = "forward" in vars(module)
        if not replaced and hasattr(module, "rope_type") and (plain := inspect.unwrap(forward)) is not forward:
            module.forward = MethodType(torch.no_grad()(plain), module)


def _rotates_halves(apply: Callable[..., Any], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Return True if `apply(q, k, cos, sin)` equals `rotary` by these tables [P, R] of every position."""
    rows, half = min(len(cos), 5), cos.shape[1] // 2
    q = torch.randn(1, 2, rows, cos.shape[1], generator=torch.Generator().manual_seed(0))
    try:
        expected, _ = apply(q, q, cos[None, :rows], sin[None, :rows])
    except (RuntimeError, TypeError):  # another layout of the tables, or another signature
        return False
    flat = q.transpose(1, 2).reshape(1, rows, -1)
    rotated = rotary(flat, cos[:, :half].contiguous(), sin[:, :half].contiguous(), torch.arange(rows)[None], 2, 0)
    return _agree(expected.transpose(1, 2).reshape(1, rows, -1), rotated)


def _agree(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    return bool((expected - actual).abs().max() <= PROBE_ERROR * expected.abs().max())


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
            cos, sin = (table[0] for table in module(torch.zeros(1, 1), torch.arange(max_positions)[None]))
            if _rotates_halves(apply, cos, sin):
                for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
                    half = table[:, : table.shape[1] // 2].contiguous().to(model.dtype)
                    model.register_buffer(name, half, persistent=False)
                single = _SingleRotation(model, module.forward, apply)
                stack.enter_context(mock.patch.object(module, "forward", single.forward))
                stack.enter_context(mock.patch.object(source, "apply_rotary_pos_emb", single.apply))
        yield


class _SingleRotation:
    """Replaces a rotary module's forward pass, and the function that applies its cosines and sines."""

    def __init__(self, model: Any, forward: Callable[..., Any], apply: Callable[..., Any]) -> None:
        self._model, self._forward, self._apply = model, forward, apply
        self._positions = torch.empty(0)
        self._latest: tuple[Any, Any] = (None, None)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the module's cosines and sines, and store them and their positions."""
        self._positions, self._latest = position_ids, self._forward(x, position_ids)
        return self._latest

    def apply(self, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        """Rotate by the operator if these are the latest cosines and sines, else as the model does."""
        if unsqueeze_dim != 1 or cos is not self._latest[0] or sin is not self._latest[1]:
            return self._apply(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return self._rotated(q), self._rotated(k)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads, nodes, size = x.shape
        cos, sin = self._model.rotary_cos, self._model.rotary_sin
        rotated = 2 * cos.shape[1]
        flat = x.transpose(1, 2).reshape(batch, nodes, heads * size)
        turned: torch.Tensor = rotary(flat, cos, sin, self._positions, heads, rotated if rotated < size else 0)
        return turned.view(batch, nodes, heads, size).transpose(1, 2)
