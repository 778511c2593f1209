"""Training of drafters that predict features: their recipes, shapes and initial weights. Each method is a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.layer import renamed, with_sizes
from redraft.methods import Method, Row
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.fitted_projections import fit_projections
from redraft.train.objectives.feature_drafter import FeatureObjective, FeatureTable
from redraft.train.training import Start, Training, table_of
from redraft.train.verifier_model import VerifierModel, drafter_embedding


def low_middle_high(layers: int) -> tuple[str, ...]:
    """Return the inputs of layers 2, L / 2 and L - 3, as EAGLE-3's drafters were published; of few layers, the first.

    Name `3` is the output of the layer with index 3.
    """
    found = (1, layers // 2 - 1, layers - 4)
    distinct = found[0] < found[1] < found[2] < layers
    return tuple(map(str, found if distinct else range(min(layers, len(found)))))


def start_from_features(drafter: FeatureDrafter, verifier: VerifierModel, batches: Iterable[Batch]) -> None:  # noqa: C901 - one case for each fusion of inputs
    """Begin with the best linear prediction of the next feature from what the drafter's first product reads.

    The layer has the products of the verifier's last layer, but adds nothing to its input at first. Products of other
    shapes stay random. A drafter without a fusion predicts the feature before the final norm, from its hidden states
    alone: tokens enter by its layer. A token-guided fusion without h has nothing to add to, so it stays random. Raises
    UsageError for a drafter without such a product, or with two.
    """
    config, state = drafter.config, drafter.state_dict()
    last = verifier.model.get_decoder().layers[-1].state_dict()
    for name, tensor in ((f"layer.{renamed(name)}", tensor) for name, tensor in last.items()):
        if name in state and (fitted := _beside(tensor.detach().float(), state[name].shape)) is not None:
            state[name] = fitted
    fused = not config.fusion.startswith("token_guided") or "fused" in config.guides
    added = ("fusion.down.weight", "fusion.down.bias") if fused else ()
    for name in ("layer.o_proj.weight", "layer.down_proj.weight", *added):
        if name in state:
            state[name] = torch.zeros_like(state[name])
    if not fused and drafter.features is None:
        drafter.load_state_dict(state)
        return
    projection: nn.Linear | None = getattr(drafter.fusion, "projection", drafter.features)
    if projection is None or (drafter.features is not None and projection is not drafter.features):
        raise UsageError("drafter.init = 'features' needs one product of the feature", "set init = 'random'")
    if projection.bias is not None:
        state["fusion.projection.bias"] = torch.zeros_like(projection.bias)
    target = LAST_HIDDEN_STATE
    if drafter.norm is not None:
        state["norm.weight"] = verifier.model.get_decoder().norm.weight.detach().float().clone()
        target = str(verifier.layers - 1)
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    embed = drafter_embedding(verifier.model)

    def inputs(hidden: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([hidden[name] for name in config.hidden_states], dim=-1)
        if projection is drafter.features:
            return drafter.normed(rows)
        return torch.cat([drafter.inputs(rows), embed(tokens).float()], dim=-1)

    fit_projections([(projection, inputs)], verifier.model, batches, target, config.hidden_states)


def _beside(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """Return a tensor in this shape, with zeros for inputs before its own; None if it does not fit."""
    if tensor.dim() == 2 and len(shape) == 2 and tensor.shape[0] == shape[0] and tensor.shape[1] < shape[1]:
        return torch.nn.functional.pad(tensor, (shape[1] - tensor.shape[1], 0))
    return tensor.clone() if tensor.shape == shape else None


class FeatureTraining(Training):
    """The training of the family. A row has the form of its drafters, and the defaults of its table.

    A recipe that several methods share thus leaves each method its own loss.
    """

    config, loss = FeatureConfig, FeatureObjective
    starts: ClassVar[Mapping[str, Start]] = {"features": start_from_features}
    schedule = "features"

    def __init__(self, method: Method[Any], row: Row) -> None:
        super().__init__(method, row)
        self.table = table_of(FeatureTable, row.loss)

    def configuration(self, table: FeatureTable, verifier: VerifierModel) -> FeatureConfig:
        """Return the drafter's configuration. Sizes of 0 in the table become the verifier's."""
        chosen: dict[str, Any] = {name: value for name in ("fusion", "outputs") if (value := getattr(table, name))}
        if table.head:
            chosen["own_head"] = table.head == "own"
        states = low_middle_high(verifier.layers) if self.row.states == "low_middle_high" else (LAST_HIDDEN_STATE,)
        return with_sizes(
            FeatureConfig, verifier.config, verifier.vocab_size, **table.sizes(verifier), fusion_size=table.fusion_size,
            guides=table.guides, hidden_states=states, **{**self.row.form, **chosen},
        )  # fmt: skip


TRAINING = FeatureTraining
