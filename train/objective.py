"""The objective of the training loop: it owns modules and turns a batch into a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from redraft.train.batches import Batch


class Objective(Protocol):
    """A method's loss, the only part of the method that the loop uses."""

    @property
    def lookahead(self) -> int:
        """Tokens that a row needs after its inputs."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to train."""

    def modules(self) -> Iterator[nn.Module]:
        """The modules that compute with them."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything that a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> object:
        """Load the result of `state_dict`."""

    def prepare(self, step: int) -> bool:
        """Prepare the next step. Returns True if the parameters are new, so that new optimisers are needed."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a scalar loss, and metrics in nats a token (a kind's name, `mtp` …) to report.

        The loss has no gradient if no token of the batch counts.
        """
