"""What training, measuring and publishing use of a drafting method, besides its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, make_dataclass
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

from transformers import PreTrainedModel

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import Storage
from redraft.export.drafters.layer import DrafterConfig
from redraft.methods import Method, Row
from redraft.train.acceptance import greedy_draft_logit_scale
from redraft.train.batches import Batch
from redraft.train.distillation import Distillation
from redraft.train.drafter_config import DrafterRecipe, DrafterTable
from redraft.train.verifier_model import VerifierModel

Start = Callable[[Any, VerifierModel, Iterable[Batch]], None]
"""Fills a fresh drafter from the verifier and, if it needs texts, the run's batches."""


Measure = Callable[[Distillation, Iterable[Batch]], Any]
"""Measures a drafter on held-out greedy texts: a field of its configuration, in plain values."""


def table_of(base: type[Any], defaults: Mapping[str, Any]) -> type[Any]:
    """Return a recipe's table with other defaults of some fields: those of a row's `loss`."""
    kinds = get_type_hints(base)
    own = [(name, kinds[name], field(default=value)) for name, value in defaults.items()]
    return make_dataclass("MethodTable", own, bases=(base,), frozen=True)


class Training(ABC):
    """The training of a method's drafters. A family's module has its class as `TRAINING`.

    table:    class of the recipe's table `drafter`, which has the settings of the loss.
    config:   class of the drafter's configuration.   loss: class of the loss, which names that of its module.
    starts:   how a drafter's weights begin, by name of `init`.
    storage:  type in which a drafter's matrices are published.
    schedule: name of the default recipe, if it is not the name of the method's command.
    measures: by field of the configuration, how to measure it; publishing writes the latest values.
    whole:    drafter, verifier -> transformers' model of both, if the drafter is one with the verifier's embedding
              and head.
    """

    table: type[Any] = DrafterTable
    config: ClassVar[type[Any]]
    loss: ClassVar[type[Distillation]]
    starts: ClassVar[Mapping[str, Start]] = {}
    storage: ClassVar[Storage] = "int8"
    schedule: ClassVar[str] = ""
    measures: ClassVar[Mapping[str, Measure]] = {"draft_logit_scale": greedy_draft_logit_scale}
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
