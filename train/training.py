"""The only parts of a drafting method that training, measuring and publishing use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, make_dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import Storage
from redraft.export.drafters.layer import DrafterConfig
from redraft.methods import Method, Row
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, DrafterTable
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


class Training(ABC):
    """The training of a method's drafters. A family's module has its class as `TRAINING`.

    table:    class of the recipe's table `drafter`, which has the settings of the loss.
    config:   class of the drafter's configuration.   drafter: class of its module.
    loss:     class of the objective; see `objective` for its arguments.
    starts:   how a drafter's weights begin, by name of `init`.
    storage:  type in which a drafter's matrices are published.
    schedule: name of the default recipe, if it is not the name of the method's command.
    measures: by field of the configuration, how to measure it; publishing writes the latest values.
    whole:    drafter, verifier -> transformers' model of both, if the drafter is one with the verifier's embedding
              and head.
    """

    table: type[Any] = DrafterTable
    config: ClassVar[type[Any]]
    drafter: ClassVar[type[nn.Module]]
    loss: ClassVar[type[Any]]
    starts: ClassVar[Mapping[str, Start]] = {}
    storage: ClassVar[Storage] = "int8"
    schedule: ClassVar[str] = ""
    measures: ClassVar[Mapping[str, Measure]] = {}
    whole: Callable[[Any, VerifierModel], PreTrainedModel] | None = None

    def __init__(self, method: Method[Any], row: Row) -> None:
        self.method, self.row = method, row

    @cached_property
    def recipe(self) -> type[Any]:
        """The class of the method's recipes: `DrafterRecipe` with its id and its table."""
        own = [
            ("method", str, field(default=self.method.id)),
            ("drafter", self.table, field(default_factory=self.table)),
        ]
        return make_dataclass("MethodRecipe", own, bases=(DrafterRecipe,), frozen=True)

    def configure(self, recipe: Any, verifier: VerifierModel) -> Any:
        """Return the drafter's configuration. Raises UsageError if the recipe's table does not fit the verifier."""
        try:
            return self.configuration(recipe.drafter, verifier)
        except (CheckpointError, UsageError) as error:
            raise UsageError(f"the recipe's drafter table: {error.message}", "change the recipe") from None

    @abstractmethod
    def configuration(self, table: Any, verifier: VerifierModel) -> DrafterConfig:
        """Return the configuration of a table's drafter. Raises CheckpointError and UsageError."""

    @abstractmethod
    def lookahead(self, config: Any, table: Any) -> int:
        """Return the tokens that a text needs after a draft's start."""

    def objective(
        self, model: Any, config: Any, recipe: Any, vocabulary: DraftColumns, compile_graph: bool
    ) -> DrafterObjective:
        """Return the loss of a recipe, initialised by torch's generator.   model: the verifier."""
        objective: DrafterObjective = self.loss(model, config, recipe.drafter, vocabulary, compile_graph)
        return objective

    def hidden_states(self, config: Any) -> tuple[str, ...]:
        """Return the verifier's hidden states that the loss reads."""
        return hidden_states_of(config)


def hidden_states_of(config: Any) -> tuple[str, ...]:
    """Return the verifier's last hidden state, and those that the drafter reads."""
    return tuple(dict.fromkeys((LAST_HIDDEN_STATE, *getattr(config, "hidden_states", ()))))
