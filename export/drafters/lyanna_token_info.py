"""Token information as engines read it: E·W1·W2, normalized, pruned to hot tokens, in fp16, int8, fp8 or two factors.

Lyanna §5.1 (the collapsed table) and §6.1 (hot tokens). The RMS of a row covers the whole vocabulary, before its
columns are pruned. The values include the gain and the draft logit scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from redraft.export import weight_files
from redraft.export.drafters.lyanna import LyannaDrafter
from redraft.export.weight_files import Slabs
from redraft.methods.lyanna import LyannaShape, token_info_tables
from redraft.names import TensorSpec, WeightRef

_SLAB_TOKENS = 1024
_INT8_MAX = 127.0
_FP8_MAX = 448.0
_TORCH = {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8, "uint8": torch.uint8,
          "int64": torch.int64}  # fmt: skip
_STORED = {"float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8", "int64": "I64"}


def make_tables(
    drafter: LyannaDrafter, embedding: Slabs, counts: torch.Tensor, shape: LyannaShape
) -> tuple[weight_files.NewTensor, ...]:
    """Return the tensors of `token_info_tables`, for embeddings [V, n] in slabs of rows and token counts [V].

    Memory does not grow with V·n or H·H: only the embedding's factors are kept, and a table is written in slabs. A
    drafter without token information adds zeros.
    """
    hot = hot_tokens(counts, shape.hot)
    forms = _forms(drafter, embedding, hot, shape)
    if shape.hot < shape.vocabulary:
        index = np.full(shape.vocabulary, shape.hot, np.int64)
        index[hot] = np.arange(shape.hot)
        forms.append(partial(iter, [index]))
    return tuple(
        weight_files.NewTensor(spec.name, _STORED[spec.dtype], tuple(map(int, spec.shape)), slabs)
        for spec, slabs in zip(token_info_tables(shape), forms, strict=True)
    )


def hot_tokens(counts: torch.Tensor, hot: int) -> NDArray[np.int64]:
    """Return the `hot` most frequent tokens, sorted by id. Among equally frequent tokens, lower ids come first."""
    order = torch.argsort(counts, descending=True, stable=True)[:hot]
    return np.asarray(order.sort().values.numpy(), dtype=np.int64)


def _forms(
    drafter: LyannaDrafter, embedding: Slabs, hot: NDArray[np.int64], shape: LyannaShape
) -> list[Callable[[], Slabs]]:
    """Return the tensors of values in the order of `token_info_tables`, with the cold row and column appended."""
    left, right = _factors(drafter, embedding, hot, shape)
    if shape.hot < shape.vocabulary:
        left, right = np.pad(left, ((0, 1), (0, 0))), np.pad(right, ((0, 0), (0, 1)))
    if shape.token_info == "lowrank":
        return [partial(iter, [left]), partial(iter, [right])]

    def slabs(part: int) -> Slabs:
        return (
            _stored(left[begin : begin + _SLAB_TOKENS] @ right, shape)[part]
            for begin in range(0, len(left), _SLAB_TOKENS)
        )

    return [partial(slabs, part) for part in range(1 if shape.token_info == "fp16" else 2)]


def _factors(
    drafter: LyannaDrafter, embedding: Slabs, hot: NDArray[np.int64], shape: LyannaShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return two factors of the hot part of the normalized table: [H, d] and [d, H]."""
    info = drafter.token_info
    if info is None:
        return np.zeros((shape.hot, shape.rank), np.float32), np.zeros((shape.rank, shape.hot), np.float32)
    down, up, gain = (p.detach().float().numpy() for p in (info.down.weight, info.up.weight, info.norm.weight))
    left = np.concatenate([rows @ down.T for rows in _hot_rows(embedding, hot)])  # [H, d]
    mean_square = np.einsum("td,de,te->t", left, up.T @ up, left, optimize=True) / len(up)  # over the vocabulary
    left /= np.sqrt(mean_square + drafter.config.rms_norm_eps)[:, None]
    right = np.ascontiguousarray((up[hot] * gain[hot, None]).T) * np.float32(drafter.config.draft_logit_scale)
    return left.astype(np.float32), right


def _hot_rows(embedding: Slabs, hot: NDArray[np.int64]) -> Slabs:
    """Yield the rows of each slab whose tokens are hot. `hot` is sorted."""
    begin = 0
    for slab in embedding:
        first, last = np.searchsorted(hot, (begin, begin + len(slab)))
        yield slab[hot[first:last] - begin]
        begin += len(slab)


def _stored(values: NDArray[np.float32], shape: LyannaShape) -> tuple[NDArray[Any], ...]:
    """Rows of the table in their type. Rows of int8 and fp8 have a scale each."""
    if shape.token_info == "fp16":
        return (values.astype(np.float16),)
    largest = _INT8_MAX if shape.token_info == "int8" else _FP8_MAX
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True) / largest, np.finfo(np.float32).tiny)
    scaled = values / scales
    if shape.token_info == "int8":
        return np.rint(scaled).astype(np.int8), scales.astype(np.float32)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales.astype(np.float32)


def examples(shape: LyannaShape) -> list[torch.Tensor]:
    """Return zeros of the right shapes and types, which take no memory, to trace a graph with."""
    return [_example(spec) for spec in token_info_tables(shape)]


def _example(spec: TensorSpec) -> torch.Tensor:
    return torch.zeros(1, dtype=_TORCH[spec.dtype]).expand([int(dim) for dim in spec.shape])


def token_info_file(drafter: str) -> str:
    """Return the file of a drafter's token information, relative to the bundle."""
    return f"{weight_files.FOLDER}/{drafter}.token_info.safetensors"


def write(tables: Sequence[weight_files.NewTensor], folder: Path, file: str) -> tuple[WeightRef, ...]:
    """Write the tables to `folder`/`file`. Returns their places in it."""
    (folder / weight_files.FOLDER).mkdir(parents=True, exist_ok=True)
    return tuple(weight_files.write(list(tables), folder, file))
