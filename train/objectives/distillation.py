"""What the losses of all methods share: the drafter, its frozen verifier, and the verifier's head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from redraft.export.drafters.layer import DrafterConfig
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.states import States, run_verifier, states_of


class Distillation(nn.Module):
    """A drafter that learns from a frozen verifier, and predicts with the verifier's head.

    hidden_states: those of the verifier that the loss reads.
    """

    hidden_states: tuple[str, ...] = (LAST_HIDDEN_STATE,)

    def __init__(
        self, drafter: nn.Module, config: DrafterConfig, verifier: Any, vocabulary: DraftColumns | None = None
    ) -> None:
        """vocabulary: of the drafts' logits; all tokens by default. Raises ValueError if its size is another."""
        super().__init__()
        self.drafter = drafter
        self._logit_scale = config.logit_scale
        self._frozen = [verifier.requires_grad_(False).eval()]  # in a list, so that it is not a submodule
        self.vocabulary = vocabulary or DraftColumns.whole(config.vocab_size)
        if len(self.vocabulary) != config.draft_size:
            raise ValueError(f"the draft vocabulary has {len(self.vocabulary)} tokens, expected {config.draft_size}")
        self._head = [self.vocabulary.rows_of(verifier.get_output_embeddings().weight)]

    @property
    def verifier(self) -> Any:
        """The frozen model."""
        return self._frozen[0]

    @property
    def head(self) -> torch.Tensor:
        """The rows of the verifier's head for the draft vocabulary, [H, n]."""
        return self._head[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The drafter's own parameters."""
        return self.drafter.named_parameters(*args, **kwargs)

    def prepare(self, step: int) -> bool:
        """Return False: the parameters never change."""
        return False

    @torch.no_grad()
    def states(self, batch: Batch) -> States:
        """Return the verifier's states of a batch: those that were kept, else computed."""
        return batch.states or states_of(*run_verifier(self.verifier, batch.tokens, self.hidden_states))

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [..., n] in the head's type, times the model's scale of logits."""
        return hidden.to(self.head.dtype) * self._logit_scale

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., H] in fp32 of hidden states [..., n]."""
        return F.linear(hidden.to(self.head.dtype), self.head).float() * self._logit_scale
