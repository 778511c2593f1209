"""Token information as engines read it: E·W1·W2, normalized, pruned to hot tokens, in fp16, int8, fp8 or two factors.

Lyanna §5.1 (the collapsed table) and §6.1 (hot tokens). The RMS of a row is taken over the whole vocabulary, before its
columns are pruned; the gain and the drafter's sharpness are folded in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from redraft import names
from redraft.export import weights
from redraft.export.drafters.lyanna import METHOD, LyannaDrafter
from redraft.names import LyannaShape, TensorSpec, WeightRef

FILE = f"{weights.FOLDER}/{METHOD}.token_info.safetensors"
_SLAB_TOKENS = 1024
_INT8_MAX = 127.0
_FP8_MAX = 448.0
_TORCH = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8, "uint8": torch.uint8,
          "int64": torch.int64}  # fmt: skip
_STORED = {"float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8", "int64": "I64"}


def make_tables(
    drafter: LyannaDrafter, embedding: NDArray[np.float32], counts: torch.Tensor, shape: LyannaShape
) -> dict[str, NDArray[Any]]:
    """The tensors of `names.token_info_tables` by name, for embeddings [V, n] and token counts [V].

    A drafter without token information adds zeros.
    """
    hot = hot_tokens(counts, shape.hot)
    tables = dict(zip((spec.name for spec in names.token_info_tables(shape)), _forms(drafter, embedding, hot, shape),
                      strict=False))  # fmt: skip
    if shape.hot < shape.vocabulary:
        index = np.full(shape.vocabulary, shape.hot, np.int64)
        index[hot] = np.arange(shape.hot)
        tables[f"{names.TOKEN_INFO}index"] = index
    return tables


def hot_tokens(counts: torch.Tensor, hot: int) -> NDArray[np.int64]:
    """The `hot` most frequent tokens in the order of their ids; of equally frequent ones the lower id."""
    order = torch.argsort(counts, descending=True, stable=True)[:hot]
    return np.asarray(order.sort().values.numpy(), dtype=np.int64)


def _forms(
    drafter: LyannaDrafter, embedding: NDArray[np.float32], hot: NDArray[np.int64], shape: LyannaShape
) -> list[NDArray[Any]]:
    """The tensors that hold the values, in the order of `names.token_info_tables`, cold row and column appended."""
    left, right = _factors(drafter, embedding, hot, shape)
    if shape.hot < shape.vocabulary:
        left, right = np.pad(left, ((0, 1), (0, 0))), np.pad(right, ((0, 0), (0, 1)))
    if shape.token_info == "lowrank":
        return [left, right]
    slabs = [_stored(left[begin : begin + _SLAB_TOKENS] @ right, shape) for begin in range(0, len(left), _SLAB_TOKENS)]
    return [np.concatenate(parts) for parts in zip(*slabs, strict=True)]


def _factors(
    drafter: LyannaDrafter, embedding: NDArray[np.float32], hot: NDArray[np.int64], shape: LyannaShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Two factors of the hot part of the normalized table: [H, d] and [d, H]."""
    info = drafter.token_info
    if info is None:
        return np.zeros((shape.hot, shape.rank), np.float32), np.zeros((shape.rank, shape.hot), np.float32)
    down, up, gain = (p.detach().float().numpy() for p in (info.down.weight, info.up.weight, info.norm.weight))
    left = embedding[hot] @ down.T  # [H, d]
    mean_square = np.einsum("td,de,te->t", left, up.T @ up, left, optimize=True) / len(up)  # over the vocabulary
    left /= np.sqrt(mean_square + drafter.config.rms_norm_eps)[:, None]
    right = np.ascontiguousarray((up[hot] * gain[hot, None]).T) * np.float32(drafter.config.sharpness)
    return left.astype(np.float32), right


def _stored(values: NDArray[np.float32], shape: LyannaShape) -> tuple[NDArray[Any], ...]:
    """Rows of the table in their type, with a scale a row where it is short."""
    if shape.token_info == "fp16":
        return (values.astype(np.float16),)
    largest = _INT8_MAX if shape.token_info == "int8" else _FP8_MAX
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True) / largest, np.finfo(np.float32).tiny)
    scaled = values / scales
    if shape.token_info == "int8":
        return np.rint(scaled).astype(np.int8), scales.astype(np.float32)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales.astype(np.float32)


def examples(shape: LyannaShape) -> list[torch.Tensor]:
    """Zeros of the right shapes and types, to trace a graph with; they take no memory."""
    return [_example(spec) for spec in names.token_info_tables(shape)]


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(1, dtype=_TORCH[spec.dtype]).expand([int(dim) for dim in spec.shape])


def write(tables: Mapping[str, NDArray[Any]], folder: Path) -> tuple[WeightRef, ...]:
    """Write the tables to `folder`/FILE; where each lies in it."""
    (folder / weights.FOLDER).mkdir(parents=True, exist_ok=True)
    made = [
        weights.Made(name, _STORED[str(table.dtype)], table.shape, (), partial(iter, [table]))
        for name, table in tables.items()
    ]
    return tuple(weights.write(made, folder, FILE))
