"""Training of a Lyanna drafter: its recipe, its shape for a verifier, and its initial weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.methods.lyanna import METHOD as SPECIFICATION
from redraft.records import PositiveInt
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, DrafterTable
from redraft.train.fitted_projections import Inputs, fit_projections
from redraft.train.method import Method
from redraft.train.mtp import load_mtp
from redraft.train.objectives.lyanna import LossWeights, LyannaObjective
from redraft.train.verifier_model import VerifierModel

_RENAMED = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm", "self_attn.": "", "mlp.": ""}


@dataclass(frozen=True)
class LyannaTable(DrafterTable):
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

    The projections are fitted to the texts of `batches`. Raises UsageError if the drafter's layer has another shape.
    """
    state = drafter.state_dict()
    body = verifier.model.get_decoder()
    found = {f"layer.{_renamed(name)}": tensor for name, tensor in body.layers[-1].state_dict().items()}
    found["norm.weight"] = body.norm.weight
    for name, tensor in found.items():
        if name not in state or state[name].shape != tensor.shape:
            raise UsageError(
                f"drafter.init = 'layer': {name} of the verifier's last layer does not fit a drafter of this shape",
                "leave the drafter's sizes to the verifier, or set init = 'random'",
            )
        state[name] = tensor.detach().to(torch.float32).clone()
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    embed = verifier.model.get_input_embeddings()
    fits: list[tuple[nn.Linear, Inputs]] = [
        (drafter.projection, lambda features, tokens: drafter.joined(features, embed(tokens).float()))
    ]
    if drafter.chain_projection is not None:
        fits.append((drafter.chain_projection, lambda features, _: drafter.chain_norm(features)))
    fit_projections(fits, verifier.model, batches)


def start_from_mtp(drafter: LyannaDrafter, verifier: VerifierModel, _: Iterable[Batch]) -> None:
    """Begin with the verifier's MTP module, which has the same form except the norm on a chain's own states.

    Raises CheckpointError if the verifier has none, UsageError if the drafter has another shape.
    """
    state = drafter.state_dict()
    width = drafter.config.hidden_size
    for name, tensor in load_mtp(verifier.checkpoint.path).state_dict().items():
        renamed = _renamed(name)
        if not drafter.config.first_token:
            if renamed.startswith("embedding_norm"):
                continue
            tensor = tensor[:, :width] if renamed == "projection.weight" else tensor
        if renamed not in state or state[renamed].shape != tensor.shape:
            raise UsageError(
                f"drafter.init = 'mtp': {name} of the verifier's module does not fit a drafter of this shape",
                "leave the drafter's sizes to the verifier, or set init = 'random'",
            )
        state[renamed] = tensor.to(torch.float32)
    state["chain_norm.weight"] = state["hidden_norm.weight"].clone()
    if drafter.chain_projection is not None:
        state["chain_projection.weight"] = torch.eye(width)
    drafter.load_state_dict(state)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


METHOD = Method(
    LyannaRecipe, LyannaConfig, LyannaDrafter, configure, objective, lambda config: int(config.steps),
    {"mtp": start_from_mtp, "layer": start_from_layer},
)  # fmt: skip
