"""The only parts of a drafting method that training, measuring and publishing use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from redraft.export.drafters.checkpoint import Storage
from redraft.export.drafters.layer import DrafterConfig
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.loop import Objective
from redraft.train.states import States
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

    @property
    def vocabulary(self) -> DraftColumns:
        """The tokens of the drafts' logits."""

    def states(self, batch: Batch) -> States:
        """Return the verifier's states of a batch: those that were kept, else computed."""

    def drafts(self, batch: Batch, states: States) -> Iterator[torch.Tensor]:
        """Yield drafts' logits by depth, [B, S, H] each.

        Depth d predicts the token after position `starts + d` (`batch.places(d)`), from the tokens before it.
        """


Start = Callable[[Any, VerifierModel, Iterable[Batch]], None]
"""Fills a fresh drafter from the verifier and, if it needs texts, the run's batches."""


Measure = Callable[[DrafterObjective, Iterable[Batch]], Any]
"""Measures a drafter on held-out greedy texts: a field of its configuration, in plain values."""


@dataclass(frozen=True)
class Method:
    """A drafting method.

    recipe:     class of its recipes.   config: class of its drafter's configuration.
    module:     configuration -> fresh drafter.
    configure:  recipe, verifier -> configuration.
    objective:  model, configuration, recipe, draft vocabulary, flag to compile -> objective, initialised by torch's
                generator.
    lookahead:  configuration, recipe -> tokens that a text needs after a draft's start.
    starts:     by name of `init`.
    hidden_states: configuration -> the verifier's hidden states that the objective reads.
    measures:   by field of the configuration, how to measure it; publishing writes the latest values.
    storage:    type in which a drafter's matrices are published.
    schedule:   name of the default recipe, if it is not the name of the method's command.
    whole:      drafter, verifier -> transformers' model of both, if the drafter is one with the verifier's embedding
                and head.
    """

    recipe: type[DrafterRecipe]
    config: type[DrafterConfig]
    module: Callable[[Any], nn.Module]
    configure: Callable[[Any, VerifierModel], DrafterConfig]
    objective: Callable[[Any, Any, Any, DraftColumns, bool], DrafterObjective]
    lookahead: Callable[[Any, Any], int]
    starts: Mapping[str, Start]
    hidden_states: Callable[[Any], tuple[str, ...]] = lambda config: (LAST_HIDDEN_STATE,)
    measures: Mapping[str, Measure] = field(default_factory=dict)
    storage: Storage = "bf16"
    schedule: str = ""
    whole: Callable[[Any, VerifierModel], PreTrainedModel] | None = None
