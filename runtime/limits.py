"""Sizes that a verifier is opened for."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Sequences at once, tokens of a sequence, and nodes, root included, of a tree and of one that a drafter makes."""

    max_num_seqs: int
    max_model_len: int
    largest_tree: int
    drafted_tree: int
