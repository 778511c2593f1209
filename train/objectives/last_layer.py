"""Drafters that begin with layers of the verifier and its final norm."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.layer import DrafterLayer, renamed
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.distillation import ChainAttention
from redraft.train.states import run_verifier
from redraft.train.verifier_model import VerifierModel

OTHER_INIT = "leave the drafter's sizes to the verifier, or set init = 'random'"
_ROUNDING = 0.03
"""Difference of two equal layers in bf16, relative to their output, at most."""


def last_layer(verifier: VerifierModel) -> int:
    """Return the number of the verifier's last layer. Raises UsageError if no layer is before it."""
    if verifier.layers < 2:
        raise UsageError("drafter.init = 'layer' needs a verifier of two layers or more", OTHER_INIT)
    return verifier.layers - 1


@torch.no_grad()
def begin_with_layers(drafter: nn.Module, layers: Mapping[str, int], verifier: VerifierModel, texts: Batch) -> None:
    """Replace layers of a drafter, and its `norm`, by those of the verifier with these numbers; move it to its device.

    A narrower feed-forward gets the neurons whose outputs have the largest mean square on `texts`.
    layers: by the name of the drafter's, the verifier's last layer at the end. Raises UsageError if a drafter's layer
    has another shape, or computes something else with the weights of the verifier's last one.
    """
    body, state = verifier.model.get_decoder(), drafter.state_dict()
    found, whole = {"norm.weight": body.norm.weight}, dict[str, torch.Tensor]()
    for name, number in layers.items():
        whole = {renamed(own): tensor for own, tensor in body.layers[number].state_dict().items()}
        found |= {f"{name}.{own}": tensor for own, tensor in whole.items()}
        width = len(state[f"{name}.up_proj.weight"])
        if width < len(whole.get("up_proj.weight", ())):
            narrow = _narrowed(whole, width, number, verifier, texts)
            found |= {f"{name}.{own}": tensor for own, tensor in narrow.items()}
    for name, tensor in found.items():
        if name not in state or state[name].shape != tensor.shape:
            raise UsageError(
                f"drafter.init: {name} of the verifier's layers does not fit a drafter of this shape",
                OTHER_INIT,
            )
        state[name] = tensor.to(torch.float32).clone()
    drafter.load_state_dict(state)
    drafter.to(verifier.model.device)
    last = _with_feed_forward(drafter.get_submodule([*layers][-1]), whole)  # type: ignore[arg-type]
    _check_last_layer(last, drafter.norm, verifier, texts)  # type: ignore[arg-type]


def _narrowed(
    whole: Mapping[str, torch.Tensor], width: int, number: int, verifier: VerifierModel, texts: Batch
) -> dict[str, torch.Tensor]:
    """Return the feed-forward of a layer, cut to the `width` neurons that add most to the rows of `texts`."""
    inputs: list[torch.Tensor] = []
    product = verifier.model.get_decoder().layers[number].mlp.down_proj
    hook = product.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        run_verifier(verifier.model, texts.tokens.to(verifier.model.device), every_logit=False)
    finally:
        hook.remove()
    real = torch.arange(texts.tokens.shape[1]) < texts.ends.cpu()[:, None]
    added = inputs[0][real].float().square().mean(0) * product.weight.float().square().sum(0)
    kept = added.topk(width).indices.sort().values
    rows = {name: whole[name][kept] for name in ("gate_proj.weight", "up_proj.weight")}
    return {**rows, "down_proj.weight": whole["down_proj.weight"][:, kept]}


def _with_feed_forward(layer: DrafterLayer, whole: Mapping[str, torch.Tensor]) -> DrafterLayer:
    """Return a copy of a drafter's layer with all of a verifier's weights."""
    layer = deepcopy(layer)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = whole[f"{name}.weight"].to(layer.mlp_norm.weight)
        product = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        product.weight = nn.Parameter(weight)
        setattr(layer, name, product)
    return layer


def _check_last_layer(layer: DrafterLayer, norm: nn.Module, verifier: VerifierModel, texts: Batch) -> None:
    """Raise UsageError if layer and norm do not compute on the first text what the verifier's last ones do."""
    tokens, layer_input = texts.tokens[:1, : int(texts.ends[0])], str(verifier.layers - 2)
    hidden, _ = run_verifier(verifier.model, tokens.to(verifier.model.device), (LAST_HIDDEN_STATE, layer_input))
    positions = torch.arange(tokens.shape[1], device=verifier.model.device)
    attend = ChainAttention(layer.config, positions[None])
    found = norm(layer(hidden[layer_input].float(), positions, attend))
    wanted = hidden[LAST_HIDDEN_STATE].float()
    if not (found - wanted).norm() < _ROUNDING * wanted.norm():
        raise UsageError("drafter.init: the verifier's last layer is not of Llama's form", OTHER_INIT)
