"""The only parts of a drafting method that training, measuring and publishing use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from redraft.export.drafters.layer import LayerConfig
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.objective import Objective
from redraft.train.verifier_model import VerifierModel


class DrafterObjective(Objective, Protocol):
    """The loss of a drafter with its frozen verifier. Its state is the drafter's, under `drafter.`."""

    @property
    def drafter(self) -> nn.Module:
        """The module to train."""

    @property
    def verifier(self) -> Any:
        """The frozen model."""

    def to(self, device: str) -> object:
        """Move the drafter."""

    def drafts(self, tokens: torch.Tensor) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        """Return the verifier's logits [B, T + lookahead, V] of tokens [B, T + lookahead], and drafts' logits by depth.

        Depth d gives [B, T, V]: the draft of row p starts at position p, and predicts token p + d + 1 from the tokens
        before it.
        """


@dataclass(frozen=True)
class Method:
    """A drafting method.

    recipe:     class of its recipes.   config: class of its drafter's configuration.
    module:     configuration -> fresh drafter.
    configure:  recipe, verifier -> configuration.
    objective:  model, configuration, recipe, flag to compile -> objective, initialised by torch's generator.
    warm_start: fills a fresh drafter from the verifier's multi-token-prediction module.
    """

    recipe: type[DrafterRecipe]
    config: type[LayerConfig]
    module: Callable[[Any], nn.Module]
    configure: Callable[[Any, VerifierModel], LayerConfig]
    objective: Callable[[Any, Any, Any, bool], DrafterObjective]
    warm_start: Callable[[Any, VerifierModel], None]
