"""The recipe of the embedded model's variant with independent heads: its texts, its length, and its number of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redraft.errors import UsageError
from redraft.methods.static_tree import MOST_HEADS
from redraft.train.config import Recipe

DEFAULT = Path(__file__).parent / "multi_head.toml"
"""The recipe that the variant was trained with."""


@dataclass(frozen=True)
class VariantRecipe(Recipe):
    """A variant's run.   draft_heads: without the verifier's own; the paper's n is one more."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"code": 0.45, "word_problems": 0.2, "prose": 0.35})
    draft_heads: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise UsageError("weights must name the kinds of the corpus")
        if not 1 <= self.draft_heads <= MOST_HEADS:
            raise UsageError(f"draft_heads must be a number from 1 to {MOST_HEADS}, not {self.draft_heads}")
