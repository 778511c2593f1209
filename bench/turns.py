"""The order in which ways of decoding take turns: it flips from prompt to prompt of a kind.

So slow minutes of the machine, and caches that one way warms for the next, affect all ways of every kind equally. Kinds
take turns too: if the order flipped with every prompt, one of two kinds would always begin with the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

Way = TypeVar("Way")
Report = Callable[[str], None]


class Flips:
    """Orders of turns by kind."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()

    def order(self, kind: Hashable, ways: Sequence[Way]) -> Sequence[Way]:
        """Return the ways as given for the first prompt of a kind, reversed for the second, and so on."""
        self._seen[kind] += 1
        return ways if self._seen[kind] % 2 else ways[::-1]


def in_turns(
    ways: Sequence[Way], kinds: Sequence[str], warm_up: Callable[[Way], object], report: Report
) -> Iterator[Sequence[Way]]:
    """Warm up every way, which is not counted. Then yield the order of the ways for each prompt, given by its kind."""
    for way in ways:
        report(f"warming up {way}")
        warm_up(way)
    flips = Flips()
    for number, kind in enumerate(kinds, start=1):
        report(f"prompt {number} of {len(kinds)}")
        yield flips.order(kind, ways)
