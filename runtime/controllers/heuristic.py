"""The schedule `heuristic_transient` of transformers' assisted generation (Mamou et al., arXiv 2405.04304)."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.runtime.controllers.rules import LengthRule


@dataclass(frozen=True)
class Heuristic(LengthRule):
    """Two more tokens if a whole draft was accepted, otherwise one fewer, at least one.

    As `heuristic_transient`, every request starts with `gamma`; `heuristic` would continue from the last request.
    """

    def update(self, average: float, drafted: int, accepted: int) -> float:
        """Return the next length. A drafter may have drafted less than the last one."""
        return drafted + 2.0 if accepted == drafted else max(1.0, average - 1)
