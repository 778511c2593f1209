"""The draft vocabulary: the tokens that a drafter's logits have columns for.

It is the whole vocabulary of the verifier, or its most frequent tokens. A drafter is trained with it (EAGLE-3's d2t) or
built with it. Head, softmax, token information and top-k of the graphs have columns for these tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from redraft import names
from redraft.errors import UsageError
from redraft.export.checkpoint.sources import AnySource, RowsSource
from redraft.export.checkpoint.weight_files import NewTensor
from redraft.export.drafters.checkpoint import TokenData


def check_counted(drafter: str, draft_vocabulary: int | None, source: str) -> None:
    """Raise UsageError if a drafter from a source without counts of tokens is to have a draft vocabulary."""
    if draft_vocabulary is not None:
        raise UsageError(
            f"drafter {drafter}: draft_vocabulary needs counts of tokens, and {source} has none",
            "leave it out, or give a drafter that `redraft train publish` wrote",
        )


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a drafter's graphs.

    tokens:  the token of each column of their logits, sorted, int64 [H].
    columns: the columns of these tokens in the logits that were trained, int64 [H].
    counts:  how often each token of the whole vocabulary was in the training texts, int64 [V].
    trained_counts: of the tokens of all columns that were trained.
    """

    tokens: NDArray[np.int64]
    columns: NDArray[np.int64]
    counts: NDArray[np.int64]
    trained_counts: NDArray[np.int64]

    @classmethod
    def of(cls, data: TokenData, size: int) -> DraftVocabulary:
        """Return the `size` most frequent tokens of those that a drafter was trained on."""
        trained = torch.arange(len(data.counts)) if data.draft_vocabulary is None else data.draft_vocabulary
        counts = data.counts[trained]
        columns = most_frequent(counts, size)
        return cls(trained.numpy()[columns], columns, data.counts.numpy(), counts.numpy())

    @property
    def is_whole(self) -> bool:
        """True if every token has a column."""
        return len(self.tokens) == len(self.counts)

    def head(self, source: AnySource, parameter: str, name: str) -> RowsSource | None:
        """Return the rows of a verifier's head for these tokens, as parameter `name`; None if these are all rows."""
        return None if self.is_whole else RowsSource(source, parameter, name, self.tokens)

    def tables(self) -> tuple[NewTensor, ...]:
        """Return the tensors of `methods.chains.draft_vocabulary_tables`."""
        if self.is_whole:
            return ()
        return (NewTensor(names.DRAFT_VOCABULARY, "I64", (len(self.tokens),), partial(iter, [self.tokens])),)


def most_frequent(counts: torch.Tensor, size: int) -> NDArray[np.int64]:
    """Return the indices of the `size` largest counts, sorted. Of equal counts, lower indices come first."""
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    return np.asarray(order.sort().values.numpy(), dtype=np.int64)
