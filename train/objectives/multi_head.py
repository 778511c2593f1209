"""The loss of heads on the verifier's trunk (Gloeckle et al. 2024, section 2, equation 2) with a frozen verifier.

A draft that starts at position s reads the trunk's states up to there. The paper trains the trunk with the heads: this
loss is for verifiers that exist already, and `experiments.multi_head` has the joint one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from redraft.errors import UsageError
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter
from redraft.train.batches import Batch, gather_places
from redraft.train.draft_columns import DraftColumns
from redraft.train.objectives.chain_attention import ChainAttention
from redraft.train.objectives.parallel_heads import HeadsObjective, LossWeights
from redraft.train.states import States


class MultiHeadObjective(HeadsObjective):
    """The loss of heads on the trunk with their frozen verifier, whose final norm the drafter copies."""

    drafter: MultiHeadDrafter

    def __init__(
        self, verifier: Any, config: MultiHeadConfig, weights: LossWeights = LossWeights(step=1.0),
        vocabulary: DraftColumns | None = None, compile_graph: bool = False,
    ) -> None:  # fmt: skip
        """The arguments are those of `HeadsObjective`. Raises UsageError if the verifier has another final norm."""
        drafter = MultiHeadDrafter(config)
        super().__init__(drafter, config, config.draft_heads, verifier, weights, vocabulary, compile_graph)
        self.hidden_states = config.hidden_states
        gains = getattr(getattr(verifier.get_decoder(), "norm", None), "weight", None)
        if gains is None or gains.shape != drafter.norm.weight.shape:
            raise UsageError("the verifier has no final norm of Llama's form, which all heads share")
        drafter.norm.weight.copy_(gains.detach().float())

    def head_states(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """See `HeadsObjective.head_states`."""
        (name,) = self.hidden_states
        trunk = states.hidden[name].to(self.drafter.norm.weight.dtype)
        starts = batch.starts.clamp(min=0)
        positions = torch.arange(trunk.shape[1], device=trunk.device)
        for head in range(self.lookahead):
            attend = ChainAttention(self.drafter.config, starts)
            yield self.drafter.head(head, trunk, positions, attend, lambda rows: gather_places(rows, starts))
