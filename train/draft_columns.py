"""The columns of a drafter's logits in training: all tokens, or the most frequent ones of its texts (EAGLE-3's d2t).

Head, softmax, token information and top-k of a drafter have one column for each of them. A small vocabulary makes a
draft cheaper; the verifier's other tokens are never drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.export.drafters.draft_vocabulary import most_frequent

SIZES = (8192, 12288, 16384, 32768)
"""Sizes whose coverage is reported."""
PARTS = (64, 32, 16, 8, 4, 2, 1)
"""Parts of a vocabulary whose coverage a comparison reports: 64 is its most frequent 1/64."""


@dataclass(frozen=True)
class DraftColumns:
    """Token ids of the columns, int64 [H], ascending, out of `size` tokens."""

    tokens: torch.Tensor
    size: int

    @classmethod
    def whole(cls, size: int) -> DraftColumns:
        """Return a vocabulary of all tokens."""
        return cls(torch.arange(size), size)

    @classmethod
    def of(cls, tokens: torch.Tensor | None, size: int) -> DraftColumns:
        """Return a drafter's vocabulary, all tokens if it has none of its own."""
        return cls.whole(size) if tokens is None else cls(tokens, size)

    @classmethod
    def most_frequent(cls, counts: NDArray[np.int64], size: int) -> DraftColumns:
        """Return the `size` most frequent tokens by counts [V]. Among equal ones, lower ids come first."""
        if not 0 < size <= len(counts):
            raise UsageError(f"a draft vocabulary of {size} tokens is not possible with {len(counts)}")
        return cls(torch.from_numpy(most_frequent(torch.from_numpy(counts), size)), len(counts))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """True if every token has a column."""
        return len(self) == self.size

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the rows of these tokens of a matrix [V, n]: itself if all are."""
        return matrix if self.is_whole else matrix[self.tokens.to(matrix.device)]

    def columns_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the columns of tokens of any shape, -1 for tokens without one."""
        return tokens.long() if self.is_whole else self._columns(tokens.device)[tokens.long()]

    def tokens_of(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the tokens of columns of any shape."""
        return columns if self.is_whole else self.tokens.to(columns.device)[columns]

    def _columns(self, device: torch.device) -> torch.Tensor:
        columns = torch.full((self.size,), -1, device=device)
        columns[self.tokens.to(device)] = torch.arange(len(self), device=device)
        return columns


def coverage(counts: NDArray[np.int64], sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
    """Return the share of all occurrences that the most frequent tokens have, by size of the vocabulary."""
    falling = np.sort(counts)[::-1]
    return {size: float(falling[:size].sum() / max(1, falling.sum())) for size in sizes if size <= len(counts)}


def frequencies(counts: NDArray[np.int64]) -> list[tuple[float, float]]:
    """Return shares of a vocabulary and of all occurrences that its most frequent tokens have (Lyanna, Figure 7)."""
    sizes = tuple(max(1, len(counts) // part) for part in PARTS)
    return [(size / len(counts), share) for size, share in coverage(counts, sizes).items()]
