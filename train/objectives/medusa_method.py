"""Training of Medusa's heads: their recipe and their configuration for a verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.methods.medusa import METHOD as SPECIFICATION
from redraft.train.acceptance import rank_accuracies
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.method import Method
from redraft.train.objectives.medusa import MedusaObjective
from redraft.train.objectives.parallel_heads import HeadsTable
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class MedusaTable(HeadsTable):
    """Shape and loss (section 2.2.1 has λ).   heads: K."""

    heads: int = 4


@dataclass(frozen=True)
class MedusaRecipe(DrafterRecipe):
    """The recipe with Medusa's table."""

    method: str = SPECIFICATION.id
    drafter: MedusaTable = field(default_factory=MedusaTable)


def configure(recipe: MedusaRecipe, verifier: VerifierModel) -> MedusaConfig:
    """Return the drafter's configuration. Raises UsageError for a number of heads that cannot be."""
    table = recipe.drafter
    try:
        return configuration_of(
            verifier.config, verifier.vocab_size, heads=table.heads, draft_vocab_size=table.draft_vocabulary
        )
    except CheckpointError as error:
        raise UsageError(f"the recipe's drafter table: {error.message}", "change the recipe") from None


def objective(
    model: Any, config: MedusaConfig, recipe: MedusaRecipe, vocabulary: DraftColumns, compile_graph: bool
) -> MedusaObjective:
    """Return the loss of a recipe."""
    return MedusaObjective(model, config, recipe.drafter.loss_weights, vocabulary, compile_graph)


METHOD = Method(
    MedusaRecipe, MedusaConfig, MedusaHeads, configure, objective, lambda config, recipe: config.heads, {},
    measures={"rank_accuracies": rank_accuracies}, storage="int8",
)  # fmt: skip
