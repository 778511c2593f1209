"""Sizes that a verifier is opened for."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Sequences at once, rows of a slot, and nodes of a tree with its root."""

    max_num_seqs: int
    max_model_len: int
    largest_tree: int
