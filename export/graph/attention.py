"""transformers' attention and mask interfaces, which record or trace the inputs of every layer's attention.

A forward pass runs twice. The first pass computes nothing: `LayerRecorder` finds each layer's sizes and mask. torch
traces the second pass, in which each call becomes a `redraft::TreeAttention` (`traced_pass`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from transformers import AttentionInterface, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from redraft.errors import RedraftError, UnsupportedModelError

if TYPE_CHECKING:
    from redraft.export.graph.traced_pass import TracedPass

INTERFACE = "redraft_tree"
HARMLESS = {
    "dropout",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "is_causal",
    "cu_seq_lens_q",
}
HEAD_MULTIPLE = 8
"""Fused kernels take multiples of this as head sizes. Positions for ALiBi are padded to one."""
POSITION_STEP = 64
"""Base that splits a key's position into two small numbers, base * first + second, which fp16 and bf16 hold exactly."""
_PROBED_TOKENS = 4


@dataclass(frozen=True)
class Mask:
    """The earlier tokens that a layer sees: the last `window`, and those of the same `chunk`. 0 means no limit."""

    window: int = 0
    chunk: int = 0

    def sees(self, query: int, key: int) -> bool:
        """Return True if the token at position `query` sees the one at `key`."""
        near = not self.window or query - key < self.window
        return key <= query and near and (not self.chunk or key // self.chunk == query // self.chunk)


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer. `head_dim` is that of its KV buffers, the larger of keys' and values'."""

    q_heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    sinks: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One layer's call of the interface: query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv].

    mask:   the object that the mask interface made, as the layer got it.
    sinks:  [Hq], or None.      slopes: [Hq], ALiBi's, or None.
    window: the layer's own, if the mask has none.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    scaling: float
    softcap: float
    window: int
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None

    @property
    def name(self) -> str:
        """The layer's class, for messages."""
        return type(self.module).__name__


CURRENT: ContextVar[LayerRecorder | TracedPass] = ContextVar("redraft_pass")
"""The running forward pass, which handles masks and attention calls."""


def current_positions(like: torch.Tensor) -> torch.Tensor:
    """Return positions [B, T] of the running pass's tokens, with hidden states [B, T, n]."""
    return CURRENT.get().positions_of(like)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, T, Hq, D].

    Raises UnsupportedModelError naming an input that the operator does not support.
    """
    surplus = sorted(k for k, v in rest.items() if k not in HARMLESS and v is not None and v is not False)
    if surplus:
        raise UnsupportedModelError(f"attention of {type(module).__name__} uses {', '.join(surplus)}, not supported")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{type(module).__name__} attends in both directions, so it is not a decoder")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(f"{type(module).__name__} attends to keys of other tokens than its own")
    if s_aux is not None and softcap:
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention sinks and a softcap, not supported together"
        )
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    call = AttentionCall(
        module, query, key, value, attention_mask, scale, float(softcap or 0.0), int(sliding_window or 0), s_aux,
        alibi_slopes,
    )  # fmt: skip
    return CURRENT.get().attend(call), None


def _mask(*, mask_function: Callable[..., Any], **sizes: Any) -> Any:
    """transformers' mask interface."""
    return CURRENT.get().mask(mask_function)


AttentionInterface.register(INTERFACE, attend)
AttentionMaskInterface.register(INTERFACE, _mask)


def key_dim(call: AttentionCall) -> int:
    """Return the components of the operator's keys, which include the position if ALiBi biases the scores."""
    size = max(call.key.shape[-1], call.value.shape[-1])
    if call.slopes is None:
        return size
    return -(-(size + 2) // HEAD_MULTIPLE) * HEAD_MULTIPLE


class LayerRecorder:
    """A forward pass that computes nothing and records how each layer attends, in the order of the calls."""

    def __init__(self, positions: int) -> None:
        self.layers: list[LayerAttention] = []
        self.order: dict[int, int] = {}
        self._positions = positions
        self._masks: list[tuple[Any, Callable[[], Mask]]] = []

    def mask(self, mask_function: Callable[..., Any]) -> Any:
        """Return a tensor of the shape of an eager mask, and record the mask that the function describes."""
        stand_in = torch.zeros(1, 1, _PROBED_TOKENS, _PROBED_TOKENS)
        self._masks.append((stand_in, partial(mask_of, mask_function, self._positions)))
        return stand_in

    def positions_of(self, like: torch.Tensor) -> torch.Tensor:
        """Return zeros."""
        return like.new_zeros(like.shape[:2], dtype=torch.long)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Record the layer."""
        if id(call.module) in self.order:
            raise UnsupportedModelError(f"a {call.name} attends twice in one pass")
        self.order[id(call.module)] = len(self.layers)
        layer_mask_of = next((mask for stand_in, mask in self._masks if stand_in is call.mask), None)
        if layer_mask_of is None:
            what = "attends without a mask" if call.mask is None else "makes its own attention mask"
            raise UnsupportedModelError(f"{call.name} {what}, which does not fit a token tree")
        layer_mask = layer_mask_of()
        if call.window and layer_mask.window not in (0, call.window):
            raise UnsupportedModelError(f"{call.name} has a window of {call.window} and a mask of {layer_mask.window}")
        mask = Mask(layer_mask.window or call.window, layer_mask.chunk)
        mask = Mask(0 if mask.window >= self._positions else mask.window, mask.chunk)
        self.layers.append(
            LayerAttention(call.query.shape[1], call.key.shape[1], key_dim(call), mask, call.sinks is not None)
        )
        batch, heads, nodes, _ = call.query.shape
        return call.value.new_zeros(batch, nodes, heads, call.value.shape[-1])


def record_layers(network: nn.Module, positions: int) -> LayerRecorder:
    """Return how each layer of a network attends, for texts of at most `positions` tokens. It reads no weight.

    Raises UnsupportedModelError naming a feature that the operator lacks.
    """
    recorder = LayerRecorder(positions)
    token = CURRENT.set(recorder)
    logger = logging.getLogger(fake_tensor.__name__)
    logger.disabled = True  # torch prints a stack before it raises
    try:
        unpacked = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
        with torch.no_grad(), unpacked, FakeTensorMode(allow_non_fake_inputs=True):
            network(input_ids=torch.ones(1, _PROBED_TOKENS, dtype=torch.long), use_cache=False)
    except RedraftError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        name = type(network).__name__
        raise UnsupportedModelError(
            f"{name} computes shapes or branches from tensor values ({error}), which cannot be exported"
        ) from error
    except Exception as error:  # transformers and torch raise many types for an inconsistent configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"{type(network).__name__} does not run with this config.json ({reason})"
        ) from error
    finally:
        logger.disabled = False
        CURRENT.reset(token)
    return recorder


def mask_of(mask_function: Callable[..., Any], positions: int) -> Mask:
    """Return the mask that a mask function of transformers makes. Calls it for texts of at most `positions` tokens.

    Raises UnsupportedModelError if the mask is neither causal nor causal within a window or a chunk.
    """
    with unset_fake_temporarily():
        sees = _evaluated(mask_function)
        mask = _mask_like(sees, positions)
        last = positions - 1
        for query in sorted({0, 1, last // 3, last // 2, last - 1, last} & set(range(positions))):
            expected = torch.tensor([mask.sees(query, key) for key in range(positions)])
            if not torch.equal(sees(query, positions), expected):
                raise UnsupportedModelError("an attention mask is not causal, nor causal within a window or a chunk")
    return mask


def _mask_like(sees: Callable[[int, int], torch.Tensor], positions: int) -> Mask:
    """Return the mask that agrees with the last queries."""
    last = positions - 1
    visible = int(sees(last, positions).sum())
    if visible >= positions:
        return Mask()
    if visible == int(sees(last - 1, last).sum()):
        return Mask(window=visible)
    begin = positions - visible
    return Mask(chunk=int(sees(begin - 1, begin).sum()))


def _evaluated(mask_function: Callable[..., Any]) -> Callable[[int, int], torch.Tensor]:
    """Apply a mask function to plain tensors: True if a query sees a key, for the first `keys` keys, bool [keys].

    Tensors in its closure have no values. They become zeros, which is right for a chunked mask's left padding.
    """
    function = _with_values(mask_function)
    zero = torch.zeros(1, dtype=torch.long)

    def sees(query: int, keys: int) -> torch.Tensor:
        seen = function(zero, zero, torch.tensor([query]), torch.arange(keys))
        return torch.as_tensor(seen).expand(keys)

    return sees


def _with_values(value: Any) -> Any:
    """Return the function with zeros in its closure instead of tensors without values."""
    if isinstance(value, FakeTensor):
        return torch.zeros(tuple(int(size) for size in value.shape), dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(_with_values(item) for item in value)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType(_with_values(cell.cell_contents)) for cell in value.__closure__)
    return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
