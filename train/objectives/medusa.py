"""Medusa's loss (Cai et al. 2024, equation 1): heads that read the verifier's last hidden state at a draft's start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.parallel_heads import HeadsObjective, LossWeights
from redraft.train.states import States


class MedusaObjective(HeadsObjective):
    """The loss of Medusa's heads with their frozen verifier."""

    drafter: MedusaHeads

    def __init__(
        self, verifier: Any, config: MedusaConfig, weights: LossWeights = LossWeights(),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """The arguments are those of `HeadsObjective`."""
        super().__init__(MedusaHeads(config), config, config.heads, verifier, weights, vocabulary, compile_graph)

    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """See `HeadsObjective.head_states`."""
        read = gather_places(states.last, batch.starts.clamp(min=0)).to(self.drafter.heads.weight.dtype)
        yield from self.drafter(read).unbind(-2)
