"""The objective of the training loop: it owns modules and turns a batch into a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from redraft.train.batches import Batch


class Objective(Protocol):
    """A method's loss; the loop knows nothing else of the method."""

    @property
    def lookahead(self) -> int:
        """Tokens that a row needs beyond its inputs."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to train."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> object:
        """The inverse of `state_dict`."""

    def prepare(self, step: int) -> bool:
        """Called before every step; True when the parameters are new ones, so that optimisers must be made anew."""

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Scalar loss with a gradient, and metrics in nats a token (a kind's name, `mtp` …) to report."""
