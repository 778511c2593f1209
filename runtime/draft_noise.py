"""The noise under which drafters choose candidates for a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from redraft.noise_spec import COUPLED, DRAWN
from redraft.runtime.params import COUPLED as ACCEPTS_COUPLED
from redraft.runtime.params import LEAST_TEMPERATURE, SamplingParams
from redraft.runtime.sampling.noise import row_key

NoiseKind = Literal["none", "coupled", "drawn"]


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """How candidates follow a request's sampling.

    temperature: of the request. At 0 candidates have no noise, and the rest does not count.
    seed:        of the request.
    stream:      COUPLED for the verifier's own noise: candidates are the tokens that the verifier would sample if the
                 drafter's logits were right. DRAWN to draw from the drafter's distribution, for rejection
                 sampling.
    """

    temperature: float = 0.0
    seed: int = 0
    stream: int = COUPLED

    @property
    def drawn(self) -> bool:
        """True if candidates are drawn from the drafter's distribution, softmax(logits / temperature)."""
        return self.stream == DRAWN and self.temperature > 0

    @property
    def kind(self) -> NoiseKind:
        """How likely a candidate is to be accepted differs between these."""
        return "drawn" if self.drawn else "coupled" if self.temperature > 0 else "none"

    def logit_scale(self, draft_logit_scale: float) -> float:
        """Return the factor on logits and noise, for a drafter whose own factor for likeliest tokens is given.

        Given the noise, the verifier's token is certain, as in greedy decoding. So the same factor fits.
        """
        return 1 / max(self.temperature, LEAST_TEMPERATURE) if self.drawn else draft_logit_scale

    def keys(self, position: int, count: int) -> list[tuple[int, int]]:
        """Return the keys of `count` positions from an absolute one on.

        Each step of a request draws with new keys, even for positions that earlier drafts had: block verification may
        have decided by those draws. Positions are below 2^32, and so are steps.
        """
        spacing = 1 << 32 if self.drawn else 1
        return [row_key(self.seed, position + step * spacing, self.stream) for step in range(count)]


NO_NOISE = DraftNoise()


def draft_noise(params: SamplingParams) -> DraftNoise:
    """Return the noise of a request's drafts: its verifier's, or independent numbers if it accepts by rejection."""
    return DraftNoise(params.temperature, params.seed, COUPLED if params.acceptance == ACCEPTS_COUPLED else DRAWN)
