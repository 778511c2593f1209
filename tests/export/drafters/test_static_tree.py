"""The static tree of a drafter within the options of its build."""

from __future__ import annotations

import pytest

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.static_tree import Accuracies, tree_of
from redraft.methods.static_tree import StaticTreeBuild

from .tiny import VOCABULARY

ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.05), (0.4, 0.1, 0.1))


def test_a_tree_keeps_to_its_options() -> None:
    """Its order is that of the heads' own accuracies: 0.6 * 0.5 is above the second candidate's 0.2."""
    found = tree_of(3, ACCURACIES, StaticTreeBuild(nodes=20, steps=2, width=2), VOCABULARY)
    assert list(found) == [(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)]
    assert list(found.values()) == pytest.approx([0.6, 0.3, 0.2, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("heads", "accuracies", "options", "line"),
    [
        (
            3,
            ACCURACIES,
            {"steps": 4},
            "the drafter has 3 heads, which draft no tree of 4 levels; build it with at most steps=3",
        ),
        (
            3,
            ACCURACIES,
            {"width": 4},
            "the drafter has accuracies of 3 candidates of a head, not of 4; .* at most width=3",
        ),
        (
            3,
            ACCURACIES,
            {"width": 3, "draft_vocabulary": 2},
            "a node cannot have 3 children of 2 tokens; lower width, or raise",
        ),
        (3, (), {}, "the drafter has accuracies of 0 heads, expected those of 3; write it again"),
        (4, ACCURACIES, {}, "the drafter has accuracies of 3 heads, expected those of 4"),
    ],
)
def test_trees_that_the_heads_do_not_cover(
    heads: int, accuracies: Accuracies, options: dict[str, int], line: str
) -> None:
    asked = StaticTreeBuild(**options)
    with pytest.raises((CheckpointError, UsageError), match=line):
        tree_of(heads, accuracies, asked, asked.draft_vocabulary or VOCABULARY)
