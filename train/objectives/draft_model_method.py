"""Training of a student: a draft model that begins with some of its verifier's layers and learns from its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.drafters.draft_model import DraftModel, DraftModelConfig, configuration_of
from redraft.methods.draft_model import METHOD as SPECIFICATION
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, DrafterTable, Init
from redraft.train.method import Method
from redraft.train.objectives.draft_model import DEPTHS, DraftModelObjective, LossWeights
from redraft.train.verifier_model import VerifierModel

_LAST = 3
"""Layers from the verifier's end in a student, by default; the first layer is before them."""


@dataclass(frozen=True)
class StudentTable(DrafterTable):
    """Shape and loss.

    layers: the verifier's layers to begin with, ascending; none means the first and the last three.
    kl, greedy, features, prompt: see LossWeights.
    init:   `layers` copies these layers and the final norm.
    """

    layers: tuple[int, ...] = ()
    kl: float = 1.0
    greedy: float = 0.0
    features: float = 0.0
    prompt: float = 1.0
    init: Init = "layers"

    def __post_init__(self) -> None:
        losses = (self.kl, self.greedy, self.features)
        if min(*losses, self.prompt) < 0 or max(losses) == 0:
            raise UsageError(
                "drafter.kl, greedy, features and prompt must be positive or zero, and one of the first three positive"
            )


@dataclass(frozen=True)
class StudentRecipe(DrafterRecipe):
    """The recipe with a student's table."""

    method: str = SPECIFICATION.id
    drafter: StudentTable = field(default_factory=StudentTable)


def default_layers(count: int) -> tuple[int, ...]:
    """Return the first and the last three of a verifier's layers, all of a verifier with four or fewer."""
    return tuple(sorted({0, *range(max(0, count - _LAST), count)}))


def configure(recipe: StudentRecipe, verifier: VerifierModel) -> DraftModelConfig:
    """Return the student's configuration. Raises UsageError if the verifier has no such layers or vocabulary."""
    table = recipe.drafter
    layers = table.layers or default_layers(verifier.layers)
    try:
        return configuration_of(verifier.config, verifier.vocab_size, layers, table.draft_vocabulary)
    except CheckpointError as error:
        raise UsageError(f"the recipe's drafter table: {error.message}", "change the recipe") from None


def objective(
    model: Any, config: DraftModelConfig, recipe: StudentRecipe, vocabulary: DraftColumns, compile_graph: bool
) -> DraftModelObjective:
    """Return the loss of a recipe."""
    table = recipe.drafter
    weights = LossWeights(table.kl, table.greedy, table.features, table.prompt)
    return DraftModelObjective(model, config, weights, vocabulary, compile_graph)


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


METHOD = Method(
    StudentRecipe, DraftModelConfig, DraftModel, configure, objective, lambda config, recipe: DEPTHS,
    {"layers": start_from_layers}, storage="int8", whole=with_embedding_and_head,
)  # fmt: skip
