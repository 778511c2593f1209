"""The tokens of a draft vocabulary, and the rows of a verifier's head for them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from redraft.export.checkpoint.sources import RandomSource, RowsSource
from redraft.export.checkpoint.stored_grid import Grid, StoredGrid
from redraft.export.drafters.checkpoint import TokenData
from redraft.export.drafters.draft_vocabulary import DraftVocabulary, most_frequent

COUNTS = torch.tensor([5, 0, 7, 5, 5, 9, 0])


def test_the_most_frequent_of_equals_are_those_of_lower_id() -> None:
    assert [most_frequent(COUNTS, size).tolist() for size in (1, 2, 3, 4, 6, 7)] == [
        [5], [2, 5], [0, 2, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5], list(range(7)),
    ]  # fmt: skip


def test_of_a_trained_draft_vocabulary_the_most_frequent_tokens_stay() -> None:
    """Columns are those of the trained logits."""
    trained = TokenData(COUNTS, torch.tensor([1, 2, 4, 6]))
    whole, pruned = DraftVocabulary.of(trained, 4), DraftVocabulary.of(trained, 2)
    assert (whole.tokens.tolist(), whole.columns.tolist()) == ([1, 2, 4, 6], [0, 1, 2, 3])
    assert (pruned.tokens.tolist(), pruned.columns.tolist()) == ([2, 4], [1, 2])
    assert not whole.is_whole
    assert [tensor.name for tensor in whole.tables()] == ["draft_vocabulary"]
    everything = DraftVocabulary.of(TokenData(COUNTS), 7)
    assert everything.is_whole
    assert everything.tables() == ()
    assert everything.head(RandomSource({}, ()), "head", "own") is None


class Slabs:
    """A head of nine rows in slabs of four, with a grid of one code a number."""

    parameters: ClassVar = {"head": (9, 2)}
    values = np.arange(18, dtype=np.float32).reshape(9, 2)

    def slabs(self, parameter: str):
        assert parameter == "head"
        return (self.values[begin : begin + 4] for begin in (0, 4, 8))

    def grid(self, parameter: str) -> StoredGrid:
        def coded():
            for slab in self.slabs(parameter):
                yield slab.astype(np.uint8), Grid(slab[:, :1], slab[:, 1:].astype(np.uint8))

        return StoredGrid(8, 2, False, coded)


@pytest.mark.parametrize("rows", [[0, 3, 4, 8], [5], [0, 1, 2], list(range(9))], ids=str)
def test_rows_of_a_parameter_are_gathered_slab_by_slab(rows: list[int]) -> None:
    source = RowsSource(Slabs(), "head", "own", np.array(rows))  # type: ignore[arg-type]
    assert source.parameters == {"own": (len(rows), 2)}
    assert np.array_equal(np.concatenate(list(source.slabs("own"))), Slabs.values[rows])
    grid = source.grid("own")
    assert grid is not None
    codes, grids = zip(*grid.slabs(), strict=True)
    assert np.array_equal(np.concatenate(codes), Slabs.values[rows])
    assert np.array_equal(np.concatenate([found.scales for found in grids])[:, 0], Slabs.values[rows][:, 0])
    assert np.array_equal(np.concatenate([found.zeros for found in grids])[:, 0], Slabs.values[rows][:, 1])


def test_gathered_rows_are_in_no_file_of_the_checkpoint(tmp_path: Path) -> None:
    source = RowsSource(Slabs(), "head", "own", np.array([1]))  # type: ignore[arg-type]
    assert source.stored("own") is None
    with pytest.raises(TypeError, match="own is in no file"):
        source.link("own", tmp_path)
