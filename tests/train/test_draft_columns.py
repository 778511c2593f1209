"""The tokens that a drafter can draft."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.train.draft_columns import DraftColumns, coverage

COUNTS = np.array([5, 0, 9, 0, 7, 5])


def test_the_most_frequent_tokens_come_in_the_order_of_ids():
    """Of tokens that are equally frequent, those with lower ids come first."""
    assert DraftColumns.most_frequent(COUNTS, 3).tokens.tolist() == [0, 2, 4]
    assert DraftColumns.most_frequent(COUNTS, 5).tokens.tolist() == [0, 1, 2, 4, 5]
    with pytest.raises(UsageError, match="7 tokens is not possible with 6"):
        DraftColumns.most_frequent(COUNTS, 7)


def test_coverage_is_the_share_of_occurrences():
    assert coverage(COUNTS, (1, 3, 6, 7)) == {1: 9 / 26, 3: 21 / 26, 6: 1.0}
