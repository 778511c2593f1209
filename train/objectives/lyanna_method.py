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
from redraft.train.objectives.chain_attention import ChainAttention
from redraft.train.objectives.lyanna import LossWeights, LyannaObjective
from redraft.train.states import run_verifier
from redraft.train.verifier_model import VerifierModel

_OTHER_INIT = "leave the drafter's sizes to the verifier, or set init = 'random'"
_ROUNDING = 0.03
"""Difference of two equal layers in bf16, relative to their output, at most."""


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
    if verifier.layers < 2:
        raise UsageError("drafter.init = 'layer' needs a verifier of two layers or more", _OTHER_INIT)
    state = drafter.state_dict()
    body = verifier.model.get_decoder()
    found = {f"layer.{renamed(name)}": tensor for name, tensor in body.layers[-1].state_dict().items()}
    found["norm.weight"] = body.norm.weight
    for name, tensor in found.items():
        if name not in state or state[name].shape != tensor.shape:
            raise UsageError(
                f"drafter.init = 'layer': {name} of the verifier's last layer does not fit a drafter of this shape",
                _OTHER_INIT,
            )
        state[name] = tensor.detach().to(torch.float32).clone()
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    batches = iter(batches)
    first = next(batches)
    _check_form(drafter, verifier, first.tokens[:1, : int(first.ends[0])])
    embed = verifier.model.get_input_embeddings()
    fits: list[tuple[nn.Linear, Inputs]] = [
        (drafter.projection, lambda hidden, tokens: drafter.joined(hidden[LAST_HIDDEN_STATE], embed(tokens).float()))
    ]
    if drafter.chain_projection is not None:
        fits.append((drafter.chain_projection, lambda hidden, _: drafter.chain_norm(hidden[LAST_HIDDEN_STATE])))
    fit_projections(fits, verifier.model, chain([first], batches), str(verifier.layers - 2))


@torch.no_grad()
def _check_form(drafter: LyannaDrafter, verifier: VerifierModel, tokens: torch.Tensor) -> None:
    """Raise UsageError if the drafter's layer and norm do not compute what the verifier's do. tokens: i64[1, L]."""
    layer_input = str(verifier.layers - 2)
    hidden, _ = run_verifier(verifier.model, tokens.to(verifier.model.device), (LAST_HIDDEN_STATE, layer_input))
    positions = torch.arange(tokens.shape[1], device=verifier.model.device)
    attend = ChainAttention(drafter.config, positions[None])
    found = drafter.norm(drafter.layer(hidden[layer_input].float(), positions, attend))
    wanted = hidden[LAST_HIDDEN_STATE].float()
    if not (found - wanted).norm() < _ROUNDING * wanted.norm():
        raise UsageError("drafter.init = 'layer': the verifier's last layer is not of Llama's form", _OTHER_INIT)


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
                _OTHER_INIT,
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
