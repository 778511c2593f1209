"""Training of a Lyanna drafter: its recipe, its shape for a verifier, and its initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from redraft.errors import UsageError
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter, configuration_of
from redraft.methods.lyanna import METHOD as SPECIFICATION
from redraft.records import PositiveInt
from redraft.train.drafter_config import DrafterRecipe, DrafterTable
from redraft.train.method import Method
from redraft.train.mtp import load_mtp
from redraft.train.objectives.lyanna import LyannaObjective
from redraft.train.verifier_model import VerifierModel

_RENAMED = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm", "self_attn.": "", "mlp.": ""}


@dataclass(frozen=True)
class LyannaTable(DrafterTable):
    """Shape and loss. `chain` is the number of steps; LyannaConfig and LyannaObjective have the other fields."""

    rank: PositiveInt = 64
    chain: PositiveInt = 4
    alpha: float = 1.0
    beta: float = 1.0
    step_weight: float = 1.0
    first_token: bool = True
    token_info: bool = True

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta) < 0 or self.alpha + self.beta <= 0 or self.step_weight <= 0:
            raise UsageError("drafter.alpha and beta must be positive or zero, not both zero, and step_weight positive")


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
    )


def objective(model: Any, config: LyannaConfig, recipe: LyannaRecipe, compile_graph: bool) -> LyannaObjective:
    """Return the loss of a recipe."""
    table = recipe.drafter
    return LyannaObjective(model, config, table.alpha, table.beta, table.step_weight, compile_graph)


def warm_start(drafter: LyannaDrafter, verifier: VerifierModel) -> None:
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
    drafter.load_state_dict(state)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


METHOD = Method(LyannaRecipe, LyannaConfig, LyannaDrafter, configure, objective, warm_start)
