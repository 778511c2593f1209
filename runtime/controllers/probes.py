"""Probes: now and then a call is larger than seems to pay, since a size that is never verified is never timed."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.runtime.controllers.experience import MOST_METHODS

_FIRST_PROBE, _LONGEST_PROBE = 8, 256
"""Steps between two probes."""
_PROBED = (8, 4, 2)
"""Entries of the cost table to probe: 7, 3 and 1 drafted nodes."""
_NEAR = 0.1


class Probes:
    """When to probe, and how many nodes. Call `compare` with each new cost table, and count `steps`.

    The delay until the next probe doubles, unless a probe finds the estimate wrong.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._at, self._patience = _FIRST_PROBE, _FIRST_PROBE
        self._probed: dict[int, tuple[int, float]] = {}
        self._count = 0

    def compare(self, sequences: int, table_ms: Sequence[float]) -> None:
        """Probe again soon if the latest probe with as many sequences changed the estimate of its size."""
        probed = self._probed.pop(sequences, None)
        if probed is not None and abs(table_ms[probed[0]] / table_ms[1] / probed[1] - 1) >= _NEAR:
            self._patience, self._at = _FIRST_PROBE, self.steps

    def nodes(self, sequences: int, table_ms: Sequence[float], paying: int, most: int, most_ms: float) -> int:
        """Return how many nodes to verify: the `paying` ones, or more in a probe, at most `most`. Sizes take turns.

        most_ms: milliseconds that a probe may cost. The turn of a dearer one is left out.
        """
        largest = min(most + 1, len(table_ms) - 1)
        if self.steps < self._at or most <= paying:
            return paying
        size = min(_PROBED[self._count % len(_PROBED)], largest)
        self._count += 1
        self._patience = min(2 * self._patience, _LONGEST_PROBE)
        self._at = self.steps + self._patience
        if table_ms[size] - table_ms[1] > most_ms:
            return paying
        while len(self._probed) >= MOST_METHODS:
            del self._probed[next(iter(self._probed))]
        self._probed[sequences] = size, table_ms[size] / table_ms[1]
        return max(paying, size - 1)
