"""SD²: a draft model steered by hidden states of the verifier.

Berdoz, Rheinboldt and Wattenhofer 2025, "Steering Pretrained Drafters during Speculative Decoding". It drafts chains.
`redraft.methods.decoder` has what it shares with a draft model.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft.methods.decoder import DecoderBuild, decoder_method

DRAFT_LENGTH = 8
"""k: the paper's drafts have so many tokens, and so do drafts in training (appendices A.4 and A.5)."""


@dataclass(frozen=True)
class SteeredBuild(DecoderBuild):
    """Options for building a drafter."""

    steps: int = DRAFT_LENGTH


METHOD = decoder_method(
    "steered",
    "SD²: a draft model that the verifier's hidden states steer.",
    SteeredBuild,
    hidden_states=("1", "0"),
)
