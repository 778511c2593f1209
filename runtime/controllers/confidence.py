"""The end of a draft at a token of low probability: `assistant_confidence_threshold` of transformers."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.runtime.controllers.rules import LengthRule, check_share


@dataclass(frozen=True)
class Confidence(LengthRule):
    """Drafts of at most `gamma` tokens that end after the first token whose probability is below a threshold.

    This token is verified too, as in transformers, which tests a token after drafting it. The defaults are those of
    transformers. With scikit-learn installed, transformers also moves its threshold after every step; this rule,
    as the GammaTune paper (§5, AssistantThreshold), does not.
    """

    gamma: int = 20
    threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)

    @property
    def confidence(self) -> float:
        """The threshold."""
        return self.threshold
