"""Training of a Lyanna drafter: its recipe, its shape for a verifier, and its initial weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.layer import renamed
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.methods.lyanna import METHOD as SPECIFICATION
from redraft.names import LAST_HIDDEN_STATE
from redraft.records import PositiveInt
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, LayerTable
from redraft.train.fitted_projections import Inputs, fit_projections
from redraft.train.method import Method
from redraft.train.mtp import load_mtp
from redraft.train.objectives.last_layer import OTHER_INIT, check_last_layer, copy_last_layer
from redraft.train.objectives.lyanna import LossWeights, LyannaObjective
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class LyannaTable(LayerTable):
    """Shape and loss. `chain` is the number of steps; LyannaConfig and LyannaObjective have the other fields."""

    rank: PositiveInt = 64
    chain: PositiveInt = 4
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.0
    step_weight: float = 1.0
    first_token: bool = True
    token_info: bool = True
    chain_projection: bool = False

    def __post_init__(self) -> None:
        losses = (self.alpha, self.beta, self.gamma)
        if min(losses) < 0 or max(losses) == 0 or self.step_weight <= 0:
            raise UsageError(
                "drafter.alpha, beta and gamma must be positive or zero, not all zero, and step_weight positive"
            )


@dataclass(frozen=True)
class LyannaRecipe(DrafterRecipe):
    """The recipe with Lyanna's table."""

    method: str = SPECIFICATION.id
    drafter: LyannaTable = field(default_factory=LyannaTable)


def configure(recipe: LyannaRecipe, verifier: VerifierModel) -> LyannaConfig:
    """Return the drafter's configuration. Sizes of 0 in the recipe become the verifier's."""
    table = recipe.drafter
    return configuration_of(
        verifier.config,
        verifier.vocab_size,
        intermediate_size=table.intermediate_size,
        heads=table.heads,
        kv_heads=table.kv_heads,
        head_dim=table.head_dim,
        rank=table.rank,
        steps=table.chain,
        first_token=table.first_token,
        token_info=table.token_info,
        chain_projection=table.chain_projection,
        draft_vocab_size=table.draft_vocabulary,
    )


def objective(
    model: Any, config: LyannaConfig, recipe: LyannaRecipe, vocabulary: DraftColumns, compile_graph: bool
) -> LyannaObjective:
    """Return the loss of a recipe."""
    table = recipe.drafter
    weights = LossWeights(table.alpha, table.beta, table.gamma, table.step_weight)
    return LyannaObjective(model, config, weights, vocabulary, compile_graph)


def start_from_layer(drafter: LyannaDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin with the verifier's last decoder layer and final norm, and projections that give this layer its inputs.

    The projections are fitted to the texts of `batches`. Raises UsageError if the drafter's layer has another shape or
    computes something else.
    """
    state = drafter.state_dict()
    copy_last_layer(state, ("layer.",), verifier)
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    batches = iter(batches)
    first = next(batches)
    check_last_layer(drafter.layer, drafter.norm, verifier, first)
    embed = verifier.model.get_input_embeddings()
    fits: list[tuple[nn.Linear, Inputs]] = [
        (drafter.projection, lambda hidden, tokens: drafter.joined(hidden[LAST_HIDDEN_STATE], embed(tokens).float()))
    ]
    if drafter.chain_projection is not None:
        fits.append((drafter.chain_projection, lambda hidden, _: drafter.chain_norm(hidden[LAST_HIDDEN_STATE])))
    fit_projections(fits, verifier.model, chain([first], batches), str(verifier.layers - 2))


def start_from_mtp(drafter: LyannaDrafter, verifier: VerifierModel, _: Iterable[Batch]) -> None:
    """Begin with the verifier's MTP module, which has the same form except the norm on a chain's own states.

    Raises CheckpointError if the verifier has none, UsageError if the drafter has another shape.
    """
    state = drafter.state_dict()
    width = drafter.config.hidden_size
    for name, tensor in load_mtp(verifier.checkpoint.path).state_dict().items():
        own = renamed(name)
        if not drafter.config.first_token:
            if own.startswith("embedding_norm"):
                continue
            tensor = tensor[:, :width] if own == "projection.weight" else tensor
        if own not in state or state[own].shape != tensor.shape:
            raise UsageError(
                f"drafter.init = 'mtp': {name} of the verifier's module does not fit a drafter of this shape",
                OTHER_INIT,
            )
        state[own] = tensor.to(torch.float32)
    state["chain_norm.weight"] = state["hidden_norm.weight"].clone()
    if drafter.chain_projection is not None:
        state["chain_projection.weight"] = torch.eye(width)
    drafter.load_state_dict(state)


METHOD = Method(
    LyannaRecipe, LyannaConfig, LyannaDrafter, configure, objective, lambda config, recipe: int(config.steps),
    {"mtp": start_from_mtp, "layer": start_from_layer},
)  # fmt: skip
