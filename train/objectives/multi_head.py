"""The loss of heads on the verifier's trunk (Gloeckle et al. 2024, section 2, equation 2) with a frozen verifier.

A draft that starts at position s reads the trunk's states up to there. The paper trains the trunk with the heads: this
loss is for verifiers that exist already, and `experiments.multi_head` has the joint one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from redraft.errors import UsageError
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, configuration_of
from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import ChainAttention
from redraft.train.drafter_config import Init, LayerTable
from redraft.train.objectives.last_layer import begin_with_layers, last_layer
from redraft.train.objectives.parallel_heads import HeadsObjective, HeadsTable, HeadsTraining
from redraft.train.states import States
from redraft.train.training import Start
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class MultiHeadTable(HeadsTable, LayerTable):
    """Shape and loss. All heads weigh alike, as in the paper.

    draft_heads: number of heads, without the verifier's own.   init: `layer` begins each head as the verifier's last
    layer.
    """

    draft_heads: int = 3
    step_weight: float = 1.0
    init: Init = "layer"


class MultiHeadObjective(HeadsObjective):
    """The loss of heads on the trunk, whose final norm is a copy of the verifier's."""

    module = MultiHeadDrafter
    drafter: MultiHeadDrafter

    def __init__(
        self, verifier: Any, config: MultiHeadConfig, table: HeadsTable = MultiHeadTable(), *arguments: Any
    ) -> None:
        """The arguments are those of `Distillation`. Raises UsageError if the verifier has another final norm."""
        super().__init__(verifier, config, table, *arguments)
        own, gains = self.drafter.norm.weight, getattr(getattr(verifier.get_decoder(), "norm", None), "weight", None)
        if gains is None or gains.shape != own.shape:
            raise UsageError("the verifier has no final norm of Llama's form, which all heads share")
        own.copy_(gains.detach().float())

    @staticmethod
    def lookahead_of(config: MultiHeadConfig, table: HeadsTable) -> int:
        """Return the number of heads."""
        return config.draft_heads

    @staticmethod
    def hidden_states_of(config: MultiHeadConfig) -> tuple[str, ...]:
        """Return the trunk's state."""
        return config.hidden_states

    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield the states of every head at all starts, from the trunk up to there."""
        (name,) = self.hidden_states
        trunk = states.hidden[name].to(self.drafter.norm.weight.dtype)
        starts = batch.starts.clamp(min=0)
        positions = torch.arange(trunk.shape[1], device=trunk.device)
        for head in range(self.lookahead):
            attend = ChainAttention(self.drafter.config, starts)
            yield self.drafter.head(head, trunk, positions, attend, lambda rows: gather_places(rows, starts))


def start_from_layer(drafter: MultiHeadDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin each head as the verifier's last layer. Raises UsageError as `begin_with_layers`."""
    layers = dict.fromkeys((f"layers.{head}" for head in range(drafter.config.draft_heads)), last_layer(verifier))
    begin_with_layers(drafter, layers, verifier, iter(batches))


class MultiHeadTraining(HeadsTraining):
    """The training of heads on the trunk."""

    table = MultiHeadTable
    starts: ClassVar[Mapping[str, Start]] = {"layer": start_from_layer}
    config, loss = MultiHeadConfig, MultiHeadObjective

    def configuration(self, table: MultiHeadTable, verifier: VerifierModel) -> MultiHeadConfig:
        """Return the drafter's configuration. Sizes of 0 in the table become the verifier's.

        Raises CheckpointError for a number of heads that cannot be, and for a verifier of one layer.
        """
        sizes = table.sizes(verifier)
        return configuration_of(verifier.config, verifier.vocab_size, draft_heads=table.draft_heads, **sizes)


TRAINING = MultiHeadTraining
