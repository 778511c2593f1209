"""Prompt lookup: continuations of earlier occurrences of the latest tokens. It needs nothing from the bundle."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.errors import UsageError
from redraft.methods.base import Method

LONGEST_MATCH = 16
"""Longest context looked up, in tokens."""


@dataclass(frozen=True)
class NgramOptions:
    """`prompt_lookup_min` and `prompt_lookup_max`: lengths in tokens of the shortest and longest context looked up."""

    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= LONGEST_MATCH:
            raise UsageError(
                f"prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}: "
                f"expected 1 <= min <= max <= {LONGEST_MATCH}"
            )


METHOD: Method[None] = Method("ngram", "N-gram lookup in the prompt and the text so far.", options=NgramOptions)
