"""Token information as engines read it: E·W1·W2, normalized, in fp16, int8, fp8 or two factors.

Lyanna §5.1 (the collapsed table) and §6.1 (few tokens have rows and columns). The RMS of a row covers all columns that
were trained, also if the drafter is built with fewer. The values include the gain.

All tokens outside of the draft vocabulary share a row, the mean of their own rows, in which token t weighs its count in
training plus 1. The paper leaves them without token information. So does a drafter that has it for its most frequent
tokens alone (`hot_tokens`): other rows and columns are zeros, and the table is no smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from redraft.export.checkpoint import weight_files
from redraft.export.checkpoint.weight_files import Slabs
from redraft.export.drafters.draft_vocabulary import DraftVocabulary, most_frequent
from redraft.methods.lyanna import LyannaShape, token_info_tables

_SLAB_TOKENS = 1024
_INT8_MAX = 127.0
_FP8_MAX = 448.0
_STORED = {"float16": "F16", "float32": "F32", "int8": "I8", "uint8": "U8", "int64": "I64"}


class TokenInfo(nn.Module):
    """RMSNorm(W2 W1 E(t)): the numbers that a token adds to the next token's logits."""

    def __init__(self, hidden_size: int, rank: int, columns: int, eps: float) -> None:
        """columns: of the logits, one for each token of the draft vocabulary, or for each frequent one."""
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, columns, bias=False)
        self.norm = nn.RMSNorm(columns, eps=eps)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the numbers that tokens of these embeddings [..., n] add to logits, [..., H]."""
        added: torch.Tensor = self.norm(self.up(self.down(embeddings)))
        return added


def make_tables(
    info: TokenInfo | None, embedding: Slabs, vocabulary: DraftVocabulary, shape: LyannaShape
) -> tuple[weight_files.NewTensor, ...]:
    """Return the tensors of `token_info_tables`, for embeddings [V, n] in slabs of rows.

    Memory does not grow with V·n or H·H: only the embedding's factors are kept, and a table is written in slabs. A
    drafter without token information (None) adds zeros.
    """
    forms = _forms(info, embedding, vocabulary, shape)
    if not vocabulary.is_whole:
        index = np.full(shape.vocabulary, len(vocabulary.tokens), np.int64)
        index[vocabulary.tokens] = np.arange(len(vocabulary.tokens))
        forms.append(partial(iter, [index]))
    return tuple(
        weight_files.NewTensor(spec.name, _STORED[spec.dtype], tuple(map(int, spec.shape)), slabs)
        for spec, slabs in zip(token_info_tables(shape), forms, strict=True)
    )


def _forms(
    info: TokenInfo | None, embedding: Slabs, vocabulary: DraftVocabulary, shape: LyannaShape
) -> list[Callable[[], Slabs]]:
    """Return the tensors of values in the order of `token_info_tables`."""
    left, right = _factors(info, embedding, vocabulary, shape)
    if shape.token_info == "lowrank":
        return [partial(iter, [left]), partial(iter, [right])]

    def slabs(part: int) -> Slabs:
        return (
            _stored(left[begin : begin + _SLAB_TOKENS] @ right, shape)[part]
            for begin in range(0, len(left), _SLAB_TOKENS)
        )

    return [partial(slabs, part) for part in range(1 if shape.token_info == "fp16" else 2)]


def _factors(
    info: TokenInfo | None, embedding: Slabs, vocabulary: DraftVocabulary, shape: LyannaShape
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return two factors of the normalized table, [rows, d] and [d, H]."""
    tokens = vocabulary.tokens
    if info is None:
        size = len(tokens) + (not vocabulary.is_whole)
        return np.zeros((size, shape.rank), np.float32), np.zeros((shape.rank, len(tokens)), np.float32)
    hot = _hot(info, vocabulary)
    up, gain = (_of_columns(p.detach().float().numpy(), hot, vocabulary) for p in (info.up.weight, info.norm.weight))
    left = np.empty((len(tokens), shape.rank), np.float32)
    others, begin = np.zeros(shape.rank), 0
    for rows in _normalized(info, embedding):
        first, last = np.searchsorted(tokens, (begin, begin + len(rows)))
        here = tokens[first:last] - begin
        left[first:last] = rows[here]
        weights = vocabulary.counts[begin : begin + len(rows)] + 1.0
        weights[here] = 0
        others += weights @ rows
        begin += len(rows)
    if not vocabulary.is_whole:
        weight = np.delete(vocabulary.counts, tokens) + 1.0
        left = np.concatenate([left, (others / weight.sum()).astype(np.float32)[None]])
    if hot is not None:
        left[: len(tokens)][~np.isin(vocabulary.columns, hot)] = 0
        left[len(tokens) :] = 0  # the row of all others
    return left, np.ascontiguousarray((up * gain[:, None]).T)


def _hot(info: TokenInfo, vocabulary: DraftVocabulary) -> NDArray[np.int64] | None:
    """Return the trained columns that have token information; None for all."""
    counts = vocabulary.trained_counts
    return None if len(info.up.weight) == len(counts) else most_frequent(torch.from_numpy(counts), len(info.up.weight))


def _of_columns(
    rows: NDArray[np.float32], hot: NDArray[np.int64] | None, vocabulary: DraftVocabulary
) -> NDArray[np.float32]:
    """Return the rows of the graph's columns from those of trained columns, or from those of the frequent ones."""
    if hot is not None:
        every = np.zeros((len(vocabulary.trained_counts), *rows.shape[1:]), np.float32)
        every[hot] = rows
        rows = every
    return rows[vocabulary.columns]


def _normalized(info: TokenInfo, embedding: Slabs) -> Slabs:
    """Yield W1 E(t), divided by the root mean square of W2 W1 E(t), for a few tokens at a time: [tokens, d]."""
    down, up = (p.detach().float().numpy() for p in (info.down.weight, info.up.weight))
    squares = up.T @ up / np.float32(len(up))  # [d, d]
    for slab in embedding:
        rows = slab @ down.T
        yield rows / np.sqrt((rows @ squares * rows).sum(1, keepdims=True) + (info.norm.eps or 0.0))


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
