"""Medusa's loss (Cai et al. 2024, equation 1): heads that read the verifier's last hidden state at a draft's start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.train.batches import Batch, gather_places
from redraft.train.objectives.parallel_heads import HeadsObjective, HeadsTable, HeadsTraining
from redraft.train.states import States
from redraft.train.verifier_model import VerifierModel


class MedusaObjective(HeadsObjective):
    """The loss of Medusa's heads."""

    module = MedusaHeads
    drafter: MedusaHeads

    @staticmethod
    def lookahead_of(config: MedusaConfig, table: HeadsTable) -> int:
        """Return the number of heads."""
        return config.heads

    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the states of every head at all starts, from the last hidden state there."""
        read = gather_places(states.last, batch.starts.clamp(min=0)).to(self.drafter.heads.weight.dtype)
        yield from self.drafter(read).unbind(-2)


@dataclass(frozen=True)
class MedusaTable(HeadsTable):
    """Shape and loss (section 2.2.1 has λ).   heads: K."""

    heads: int = 4


class MedusaTraining(HeadsTraining):
    """The training of Medusa's heads."""

    table = MedusaTable
    config, loss = MedusaConfig, MedusaObjective

    def configuration(self, table: MedusaTable, verifier: VerifierModel) -> MedusaConfig:
        """Return the drafter's configuration. Raises CheckpointError for a number of heads that cannot be."""
        return configuration_of(
            verifier.config, verifier.vocab_size, heads=table.heads, draft_vocab_size=table.draft_vocabulary
        )


TRAINING = MedusaTraining
