"""Training of Medusa's heads: their recipe and their configuration for a verifier."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.medusa import MedusaConfig, MedusaHeads, configuration_of
from redraft.methods.medusa import METHOD as SPECIFICATION
from redraft.train.acceptance import rank_accuracies
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, DrafterTable
from redraft.train.method import Method
from redraft.train.objectives.medusa import LossWeights, MedusaObjective
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class MedusaTable(DrafterTable):
    """Shape and loss.

    heads: K.   soft, hard, greedy: weights of a head's cross-entropies (LossWeights).   step_weight: λ, of section
    2.2.1; head k weighs λ^k.
    """

    heads: int = 4
    soft: float = 1.0
    hard: float = 1.0
    greedy: float = 0.0
    step_weight: float = 0.8

    def __post_init__(self) -> None:
        losses = (self.soft, self.hard, self.greedy)
        if not all(0 <= weight < inf for weight in losses) or not sum(losses) or not 0 < self.step_weight < inf:
            raise UsageError(
                "drafter.soft, hard and greedy must be 0 or more, not all 0, and step_weight must be above 0"
            )


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
    table = recipe.drafter
    weights = LossWeights(table.soft, table.hard, table.greedy, table.step_weight)
    return MedusaObjective(model, config, weights, vocabulary, compile_graph)


METHOD = Method(
    MedusaRecipe, MedusaConfig, MedusaHeads, configure, objective, lambda config, recipe: config.heads, {},
    measures={"rank_accuracies": rank_accuracies}, storage="int8",
)  # fmt: skip
