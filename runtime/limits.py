"""The sizes that limit a verifier."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Most sequences, most tokens of a sequence, and most nodes, root included, of a tree and of a drafted one."""

    max_num_seqs: int
    max_model_len: int
    largest_tree: int
    drafted_tree: int
