"""Training of heads on a frozen verifier's trunk: their recipe, their shape and their initial weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.multi_head import MultiHeadConfig, MultiHeadDrafter, configuration_of
from redraft.methods.multi_head import METHOD as SPECIFICATION
from redraft.train.acceptance import rank_accuracies
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, Init, LayerTable
from redraft.train.method import Method
from redraft.train.objectives.last_layer import check_last_layer, copy_last_layer
from redraft.train.objectives.multi_head import MultiHeadObjective
from redraft.train.objectives.parallel_heads import HeadsTable
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class MultiHeadTable(HeadsTable, LayerTable):
    """Shape and loss. All heads weigh alike, as in the paper.

    draft_heads: number of heads, without the verifier's own.   init: `layer` begins each head as the verifier's last
    layer.
    """

    draft_heads: int = 3
    step_weight: float = 1.0
    init: Init = "layer"


@dataclass(frozen=True)
class MultiHeadRecipe(DrafterRecipe):
    """The recipe with this method's table."""

    method: str = SPECIFICATION.id
    drafter: MultiHeadTable = field(default_factory=MultiHeadTable)


def configure(recipe: MultiHeadRecipe, verifier: VerifierModel) -> MultiHeadConfig:
    """Return the drafter's configuration. Sizes of 0 in the recipe become the verifier's.

    Raises UsageError for a number of heads that cannot be, and for a verifier of one layer.
    """
    table = recipe.drafter
    try:
        return configuration_of(
            verifier.config, verifier.vocab_size, draft_heads=table.draft_heads,
            intermediate_size=table.intermediate_size, heads=table.heads, kv_heads=table.kv_heads,
            head_dim=table.head_dim, draft_vocab_size=table.draft_vocabulary,
        )  # fmt: skip
    except CheckpointError as error:
        raise UsageError(f"the recipe's drafter table: {error.message}", "change the recipe") from None


def objective(
    model: Any, config: MultiHeadConfig, recipe: MultiHeadRecipe, vocabulary: DraftColumns, compile_graph: bool
) -> MultiHeadObjective:
    """Return the loss of a recipe."""
    return MultiHeadObjective(model, config, recipe.drafter.loss_weights, vocabulary, compile_graph)


def start_from_layer(drafter: MultiHeadDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin each head as the verifier's last layer. Raises UsageError if it has another shape or form."""
    state = drafter.state_dict()
    copy_last_layer(state, [f"layers.{head}." for head in range(drafter.config.draft_heads)], verifier)
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    check_last_layer(drafter.layers[0], drafter.norm, verifier, next(iter(batches)))  # type: ignore[arg-type]


METHOD = Method(
    MultiHeadRecipe, MultiHeadConfig, MultiHeadDrafter, configure, objective,
    lambda config, recipe: config.draft_heads, {"layer": start_from_layer}, lambda config: config.hidden_states,
    measures={"rank_accuracies": rank_accuracies}, storage="int8",
)  # fmt: skip
