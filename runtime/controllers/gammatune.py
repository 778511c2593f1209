"""GammaTune and GammaTune+ (Gautam, Shrestha, Reddy: Token-Driven GammaTune, §4.1 and §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.errors import UsageError
from redraft.runtime.controllers.rules import LengthRule, check_share


@dataclass(frozen=True)
class GammaTune(LengthRule):
    """An exponential average γ̄ of the accepted tokens A (Eq. 8). The next draft has γ = ⌈γ̄⌉ tokens.

    If A = γ, then A ← A + δ before the average, as the text of §4.1 says. Eq. 7 and line 2 of Algorithm 1 assign
    A + δ to γ instead, which line 5 overwrites: read literally, the average could never exceed γ, and γ never grow.

    The paper gives no value of eta (η), delta (δ), gamma_min and gamma_max. The defaults are among the best of
    `experiments/controller_sweep.py` for SmolLM2 and its student, with the paper's longest draft as gamma_max.
    """

    eta: float = 0.7
    delta: int = 1
    gamma_min: int = 1
    gamma_max: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("eta", self.eta)
        if self.delta < 0:
            raise UsageError(f"delta must be at least 0, not {self.delta}")
        if not 1 <= self.gamma_min <= self.gamma_max:
            raise UsageError(
                f"gamma_min {self.gamma_min} and gamma_max {self.gamma_max}: expected 1 <= gamma_min <= gamma_max"
            )

    def length(self, average: float) -> int:
        """Return γ, which a first length may not move out of its bounds."""
        return min(self.gamma_max, max(self.gamma_min, super().length(average)))

    def update(self, average: float, drafted: int, accepted: int) -> float:
        """Return γ̄ after a draft."""
        if accepted == self.length(average):
            accepted += self.delta
        return min(self.gamma_max, max(self.gamma_min, (1 - self.eta) * average + self.eta * accepted))


@dataclass(frozen=True)
class GammaTunePlus(GammaTune):
    """GammaTune whose drafts also end after a token of low probability (§4.2), as in `confidence`.

    The paper gives no threshold (τ) either; the same sweep chose it.
    """

    threshold: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)

    @property
    def confidence(self) -> float:
        """The threshold."""
        return self.threshold
