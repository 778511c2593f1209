"""Training of drafters that predict features: their recipes, shapes and initial weights. Methods are presets of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from redraft.errors import UsageError
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.feature_graphs import configuration_of
from redraft.methods.base import Method as Specification
from redraft.train.batches import Batch
from redraft.train.draft_columns import DraftColumns
from redraft.train.drafter_config import DrafterRecipe, LayerTable
from redraft.train.fitted_projections import fit_projections
from redraft.train.method import Method
from redraft.train.mtp import renamed
from redraft.train.objectives.feature_drafter import FeatureLoss, FeatureObjective, LossSettings, hidden_states_of
from redraft.train.verifier_model import VerifierModel


@dataclass(frozen=True)
class FeatureTable(LayerTable):
    """Shape and loss: see LossSettings and FeatureConfig.

    init: `features` begins with the products of the verifier's last layer, an output that adds nothing to its input, and
          a projection fitted to the next feature.
    """

    passes: int = 1
    step_weight: float = 1.0
    detach: bool = False
    feature_loss: FeatureLoss = "smooth_l1"
    features: float = 1.0
    soft: float = 0.1
    hard: float = 0.0
    greedy: float = 0.0
    top: int = 0
    top_weight: float = 0.0
    aligned: int = 0
    noise: float = 0.0
    fusion_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.passes <= 16:
            raise UsageError(f"drafter.passes must be a number from 1 to 16, not {self.passes}")
        weights = (self.features, self.soft, self.hard, self.greedy, self.top_weight, self.noise)
        if not all(weight >= 0 for weight in weights) or not self.step_weight > 0:
            raise UsageError(
                "drafter.features, soft, hard, greedy, top_weight and noise must be 0 or more, step_weight above 0"
            )
        if min(self.top, self.aligned, self.fusion_size) < 0:
            raise UsageError("drafter.top, aligned and fusion_size must be 0 or more")
        if not self.soft + self.hard + self.greedy + self.top * self.top_weight > 0:
            raise UsageError("drafter: no loss of tokens", "set soft, hard, greedy, or top and top_weight")


@dataclass(frozen=True)
class FeatureRecipe(DrafterRecipe):
    """The recipe with the family's table."""

    drafter: FeatureTable = field(default_factory=FeatureTable)


def method_of(specification: Specification[Any], form: Mapping[str, Any], **loss: Any) -> Method:
    """Return how to train a method: its form (`FeatureConfig`), and its defaults of the recipe's table."""

    @dataclass(frozen=True)
    class Recipe(FeatureRecipe):
        method: str = specification.id
        drafter: FeatureTable = field(default_factory=lambda: FeatureTable(**loss))

    def configure(recipe: Any, verifier: VerifierModel) -> FeatureConfig:
        """Return the drafter's configuration. Sizes of 0 in the recipe become the verifier's."""
        table = recipe.drafter
        return configuration_of(
            verifier.config, verifier.vocab_size, intermediate_size=table.intermediate_size, heads=table.heads,
            kv_heads=table.kv_heads, head_dim=table.head_dim, fusion_size=table.fusion_size,
            draft_vocab_size=table.draft_vocabulary, **form,
        )  # fmt: skip

    return Method(
        Recipe, FeatureConfig, FeatureDrafter, configure, _objective,
        lambda config, recipe: FeatureObjective.lookahead_of(recipe.drafter.passes), {"features": start_from_features},
        hidden_states_of, storage="int8", schedule="features",
    )  # fmt: skip


def _objective(
    model: Any, config: FeatureConfig, recipe: Any, vocabulary: DraftColumns, compile_graph: bool
) -> FeatureObjective:
    """Return the loss of a recipe."""
    settings = LossSettings(**{one.name: getattr(recipe.drafter, one.name) for one in fields(LossSettings)})
    return FeatureObjective(model, config, settings, vocabulary, compile_graph)


def start_from_features(drafter: FeatureDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:
    """Begin with the best linear prediction of the next feature from the feature and the token before it.

    The layer has the products of the verifier's last layer, but adds nothing to its input at first. Products of other
    shapes stay random. Raises UsageError for a drafter that reads other hidden states than the one it predicts.
    """
    projection = getattr(drafter.fusion, "projection", None)
    if projection is None:
        raise UsageError("drafter.init = 'features' needs a drafter with a projection", "set init = 'random'")
    state = drafter.state_dict()
    last = verifier.model.get_decoder().layers[-1].state_dict()
    for name, tensor in ((f"layer.{renamed(name)}", tensor) for name, tensor in last.items()):
        if name in state and state[name].shape == tensor.shape:
            state[name] = tensor.detach().to(torch.float32).clone()
    for name in ("layer.o_proj.weight", "layer.down_proj.weight", "fusion.down.weight", "fusion.down.bias"):
        if name in state:
            state[name] = torch.zeros_like(state[name])
    for name in ("predict.weight", "regress.weight"):
        if name in state:
            state[name] = torch.eye(len(state[name]))
    state["fusion.projection.bias"] = torch.zeros_like(state["fusion.projection.bias"])
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    embed = verifier.model.get_input_embeddings()
    fit_projections(
        [(projection, lambda features, tokens: torch.cat([features, embed(tokens).float()], dim=-1))],
        verifier.model, batches, next_feature=True,
    )  # fmt: skip
