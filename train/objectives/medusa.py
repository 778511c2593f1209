"""Medusa's loss (Cai et al. 2024, equation 1): heads that read the verifier's last hidden state at a draft's start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.parallel_heads import HeadsObjective, HeadsTable, HeadsTraining, LossWeights
from redraft.train.states import States
from redraft.train.verifier_model import VerifierModel


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


@dataclass(frozen=True)
class MedusaTable(HeadsTable):
    """Shape and loss (section 2.2.1 has λ).   heads: K."""

    heads: int = 4


class MedusaTraining(HeadsTraining):
    """The training of Medusa's heads."""

    table = MedusaTable
    config, drafter, loss = MedusaConfig, MedusaHeads, MedusaObjective

    def configuration(self, table: MedusaTable, verifier: VerifierModel) -> MedusaConfig:
        """Return the drafter's configuration. Raises CheckpointError for a number of heads that cannot be."""
        return configuration_of(
            verifier.config, verifier.vocab_size, heads=table.heads, draft_vocab_size=table.draft_vocabulary
        )

    def lookahead(self, config: MedusaConfig, table: HeadsTable) -> int:
        """Return the number of heads."""
        return config.heads


TRAINING = MedusaTraining
