"""Training of drafters that are decoders of their own and begin with some of the verifier's layers: students.

Methods are presets: a specification and a class of recipes, whose table derives from `StudentTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, configuration_of
from redraft.export.graph import decoder
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, DrafterTable, Init
from redraft.train.method import Method
from redraft.train.objectives.decoder_drafter import (
    DEPTHS,
    DraftModelObjective,
    LossWeights,
    Offsets,
    hidden_states_of,
)
from redraft.train.verifier_model import VerifierModel

T = TypeVar("T")
_LAST = 3
"""Layers from the verifier's end in a student, by default; the first layer is before them."""


@dataclass(frozen=True)
class StudentTable(LossWeights, DrafterTable):
    """Shape and loss.

    layers: the verifier's layers to begin with, ascending; none means the first and the last three.
    init:   `layers` copies these layers and the final norm.
    """

    layers: tuple[int, ...] = ()
    init: Init = "layers"

    def __post_init__(self) -> None:
        losses = (self.kl, self.hard, self.greedy, self.features)
        if min(*losses, self.prompt) < 0 or max(losses) == 0:
            raise UsageError(
                "drafter.kl, hard, greedy, features and prompt must be positive or zero, and one of the first four "
                "positive"
            )


@dataclass(frozen=True)
class SteeringTable(Offsets, StudentTable):
    """The table of a student with steering.

    hidden_states: the verifier's that steer it, the highest layer first; none means the paper's, 3, L/2 and L - 2.
    frozen:        True to train steering alone (the paper's ablation).
    """

    hidden_states: tuple[str, ...] = ()
    frozen: bool = False

    def __post_init__(self) -> None:
        StudentTable.__post_init__(self)
        Offsets.__post_init__(self)


def default_layers(count: int) -> tuple[int, ...]:
    """Return the first and the last three of a verifier's layers, all of a verifier with four or fewer."""
    return tuple(sorted({0, *range(max(0, count - _LAST), count)}))


def high_middle_low(count: int) -> tuple[str, ...]:
    """Return the hidden states after layers L - 2, L/2 and 3 of L, counted from 1 (SD², appendix A.5).

    A verifier with few layers has fewer different ones. Name `2` is the output of the layer with index 2, the third.
    """
    wanted = (count - 2, count // 2, 3)
    return tuple(dict.fromkeys(str(min(max(layer, 1), count) - 1) for layer in sorted(wanted, reverse=True)))


def _states(table: StudentTable, verifier: VerifierModel) -> tuple[str, ...]:
    """Return the hidden states that steer a student of this table; none without steering."""
    if not isinstance(table, SteeringTable):
        return ()
    decoder.check_hidden_states(table.hidden_states, verifier.layers)
    return table.hidden_states or high_middle_low(verifier.layers)


def configure(recipe: Any, verifier: VerifierModel) -> DraftModelConfig:
    """Return the student's configuration. Raises UsageError if the verifier has no such layers or vocabulary.

    Raises UnsupportedModelError naming a layer that takes no steering.
    """
    table: StudentTable = recipe.drafter
    layers = table.layers or default_layers(verifier.layers)
    try:
        states = _states(table, verifier)
        config = configuration_of(verifier.config, verifier.vocab_size, layers, table.draft_vocabulary, states)
    except (CheckpointError, UsageError) as error:
        raise UsageError(f"the recipe's drafter table: {error.message}", "change the recipe") from None
    if states:
        with torch.device("meta"):
            DraftModel(config)
    return config


def objective(
    model: Any, config: DraftModelConfig, recipe: Any, vocabulary: DraftColumns, compile_graph: bool
) -> DraftModelObjective:
    """Return the loss of a recipe."""
    table: StudentTable = recipe.drafter
    weights = _part(LossWeights, table)
    if not isinstance(table, SteeringTable):
        return DraftModelObjective(model, config, weights, vocabulary, compile_graph)
    return DraftModelObjective(model, config, weights, vocabulary, compile_graph, _part(Offsets, table), table.frozen)


def _part(kind: type[T], table: Any) -> T:
    """Return the fields of a table that are those of another class."""
    return kind(**{one.name: getattr(table, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def start_from_layers(student: DraftModel, verifier: VerifierModel, _: Iterable[Batch]) -> None:
    """Begin with the verifier's layers and final norm.

    Raises UnsupportedModelError if a layer has another form than the student's.
    """
    teacher = verifier.model.get_decoder().state_dict()
    stack = next(
        f"{name}." for name, module in verifier.model.get_decoder().named_children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == verifier.layers
    )  # fmt: skip
    body = student.body
    state = body.state_dict()
    for name, tensor in state.items():
        source = name
        if name.startswith(stack):
            number, rest = name.removeprefix(stack).split(".", 1)
            source = f"{stack}{student.config.layers[int(number)]}.{rest}"
        if source not in teacher or teacher[source].shape != tensor.shape:
            raise UnsupportedModelError(
                f"{source} of the verifier does not fit layer {name} of a student with these layers",
                "choose layers of one kind, in the order of the verifier's kinds",
            )
        tensor.copy_(teacher[source])


def with_embedding_and_head(student: DraftModel, verifier: VerifierModel) -> PreTrainedModel:
    """Return the student as a model of its own in fp32, with a copy of the verifier's embedding and whole head."""
    embedding, head = verifier.model.get_input_embeddings(), verifier.model.get_output_embeddings()
    return student.whole(embedding.weight, head.weight)


def method_of(
    recipe: type[DrafterRecipe], whole: Callable[[Any, VerifierModel], PreTrainedModel] | None = None
) -> Method:
    """Return how to train a method.   recipe: whose table is a StudentTable.   whole: see `Method`."""
    return Method(
        recipe, DraftModelConfig, DraftModel, configure, objective, lambda config, recipe: DEPTHS,
        {"layers": start_from_layers}, hidden_states_of, storage="int8", whole=whole,
    )  # fmt: skip
