"""Drafters that begin with layers of the verifier and its final norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def copy_last_layer(state: dict[str, torch.Tensor], stems: Iterable[str], verifier: VerifierModel) -> None:
    """Replace the layers of these names in a drafter's state, and its `norm.weight`, by the verifier's last ones.

    Raises UsageError if the drafter's layer has another shape.
    """
    if verifier.layers < 2:
        raise UsageError("drafter.init = 'layer' needs a verifier of two layers or more", OTHER_INIT)
    copy_layers(state, dict.fromkeys(stems, verifier.layers - 1), verifier)


def copy_layers(state: dict[str, torch.Tensor], layers: Mapping[str, int], verifier: VerifierModel) -> None:
    """Replace layers in a drafter's state by those of the verifier with these numbers, and its `norm.weight`.

    layers: by the stem of the drafter's names. Raises UsageError if the drafter's layer has another shape.
    """
    body = verifier.model.get_decoder()
    found = {"norm.weight": body.norm.weight}
    for stem, number in layers.items():
        found |= {f"{stem}{renamed(name)}": tensor for name, tensor in body.layers[number].state_dict().items()}
    for name, tensor in found.items():
        if name not in state or state[name].shape != tensor.shape:
            raise UsageError(
                f"drafter.init: {name} of the verifier's layers does not fit a drafter of this shape",
                OTHER_INIT,
            )
        state[name] = tensor.detach().to(torch.float32).clone()


@torch.no_grad()
def check_last_layer(layer: DrafterLayer, norm: nn.Module, verifier: VerifierModel, batch: Batch) -> None:
    """Raise UsageError if layer and norm do not compute on a text of `batch` what the verifier's last ones do."""
    tokens, layer_input = batch.tokens[:1, : int(batch.ends[0])], str(verifier.layers - 2)
    hidden, _ = run_verifier(verifier.model, tokens.to(verifier.model.device), (LAST_HIDDEN_STATE, layer_input))
    positions = torch.arange(tokens.shape[1], device=verifier.model.device)
    attend = ChainAttention(layer.config, positions[None])
    found = norm(layer(hidden[layer_input].float(), positions, attend))
    wanted = hidden[LAST_HIDDEN_STATE].float()
    if not (found - wanted).norm() < _ROUNDING * wanted.norm():
        raise UsageError("drafter.init: the verifier's last layer is not of Llama's form", OTHER_INIT)
