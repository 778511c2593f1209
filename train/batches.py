"""Batches whose content is a pure function of (seed, step).

Each kind is one stream of tokens, cut into blocks. An epoch permutes them and has its own phase. No token is thus seen
twice before all are seen once, and the next epoch cuts at other places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import DataError

_CYCLE_ROWS = 100  # shares are exact over this number of rows


@dataclass(frozen=True)
class Batch:
    """`tokens` i64[B, T + lookahead] and the kind of every row."""

    tokens: torch.Tensor
    kinds: tuple[str, ...]


class BatchPlan:
    """Draws rows from token streams in fixed shares; `rows(step)` never depends on earlier draws."""

    def __init__(
        self, streams: Mapping[str, NDArray[np.integer[Any]]], weights: Mapping[str, float], seed: int, lookahead: int
    ) -> None:
        """`streams` maps kinds to 1-D token arrays. A row of T inputs has `lookahead` more tokens, for its targets.

        Raises DataError if kinds and weights differ.
        """
        if set(streams) != set(weights):
            raise DataError(f"data kinds {sorted(streams)} do not match the recipe's weights {sorted(weights)}")
        self._streams = dict(streams)
        self._cycle = _interleave(weights)
        self._seed = seed
        self._lookahead = lookahead

    def batch(self, step: int, rows: int, length: int) -> Batch:
        """Return the batch of `step`: `rows` rows of `length` inputs each, kinds interleaved."""
        drawn = [self._draw(step * rows + row) for row in range(rows)]
        tokens = np.stack([self._row(kind, index, length) for kind, index in drawn])
        return Batch(torch.from_numpy(tokens.astype(np.int64)), tuple(kind for kind, _ in drawn))

    def _draw(self, row: int) -> tuple[str, int]:
        """Return the kind of the run's `row`-th row, and the number of earlier rows of this kind."""
        cycle, place = divmod(row, len(self._cycle))
        kind = self._cycle[place]
        return kind, cycle * self._cycle.count(kind) + self._cycle[:place].count(kind)

    def _row(self, kind: str, index: int, length: int) -> NDArray[np.integer[Any]]:
        stream = self._streams[kind]
        blocks = blocks_of(kind, len(stream), length, self._lookahead)
        epoch, place = divmod(index, blocks)
        salt = sum(map(ord, kind))
        rng = np.random.Generator(np.random.PCG64([self._seed, salt, epoch, length]))
        start = int(rng.integers(length)) + int(rng.permutation(blocks)[place]) * length
        return stream[start : start + length + self._lookahead]


def blocks_of(kind: str, tokens: int, length: int, lookahead: int) -> int:
    """Return the number of rows of `length` in an epoch over `tokens` tokens. Raises DataError if it is zero."""
    blocks = (tokens - lookahead) // length - 1
    if blocks < 1:
        raise DataError(
            f"the corpus of {kind} has {tokens} tokens, too few for rows of {length}", "give a longer corpus"
        )
    return blocks


def _interleave(weights: Mapping[str, float]) -> tuple[str, ...]:
    """Return a cycle of kinds in the given proportions, each kind spread evenly over it."""
    total = sum(weights.values())
    counts = {kind: max(1, round(_CYCLE_ROWS * weight / total)) for kind, weight in weights.items()}
    slots = [((n + 0.5) / count, kind) for kind, count in counts.items() for n in range(count)]
    return tuple(kind for _, kind in sorted(slots))
