"""Drafters that begin with layers of the verifier and its final norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import torch
from torch import nn

from redraft.errors import UsageError
from redraft.export.drafters.layer import DrafterLayer, LayerConfig, renamed
from redraft.names import LAST_HIDDEN_STATE
from redraft.train.batches import Batch
from redraft.train.distillation import ChainAttention
from redraft.train.states import run_verifier
from redraft.train.verifier_model import VerifierModel

OTHER_INIT = "leave the drafter's sizes to the verifier, or set init = 'random'"
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_RANKED_ROWS = 4096
"""Rows of texts that neurons are ranked by."""
_ROUNDING = 0.03
"""Difference of two equal layers in bf16, relative to their output, at most."""


def last_layer(verifier: VerifierModel) -> int:
    """Return the number of the verifier's last layer. Raises UsageError if no layer is before it."""
    if verifier.layers < 2:
        raise UsageError("drafter.init = 'layer' needs a verifier of two layers or more", OTHER_INIT)
    return verifier.layers - 1


@torch.no_grad()
def begin_with_layers(
    drafter: nn.Module, layers: Mapping[str, int], verifier: VerifierModel, batches: Iterator[Batch]
) -> list[Batch]:
    """Replace layers of a drafter, and its `norm`, by those of the verifier with these numbers; move it to its device.

    A narrower feed-forward gets the neurons whose outputs have the largest mean square on some texts. Of more key/value
    heads, each of the verifier's becomes several.
    layers: by the name of the drafter's, the verifier's last layer at the end. Returns the batches that were read.
    Raises UsageError if a drafter's layer has another shape, or if the last one computes something else with the
    verifier's weights.
    """
    body, state = verifier.model.get_decoder(), drafter.state_dict()
    whole = {
        number: {renamed(name): tensor for name, tensor in body.layers[number].state_dict().items()}
        for number in layers.values()
    }
    if not all(f"{name}.weight" in layer for layer in whole.values() for name in _FEED_FORWARD):
        raise _other_form()
    first: DrafterLayer = drafter.get_submodule(next(iter(layers)))  # type: ignore[assignment]
    whole = {number: _with_heads(layer, first.config) for number, layer in whole.items()}
    found = {"norm.weight": body.norm.weight}
    found |= {f"{name}.{own}": tensor for name, number in layers.items() for own, tensor in whole[number].items()}
    width = len(state[f"{next(iter(layers))}.up_proj.weight"])
    narrow = width < min(len(layer["up_proj.weight"]) for layer in whole.values())
    feed_forward = tuple(f"{name}.weight" for name in _FEED_FORWARD)
    for name, tensor in found.items():
        if narrow and name.endswith(feed_forward):
            continue
        if name not in state or state[name].shape != tensor.shape:
            raise UsageError(
                f"drafter.init: {name} of the verifier's layers does not fit a drafter of this shape",
                "leave the drafter's sizes to the verifier (intermediate_size may be smaller, kv_heads a multiple), or "
                "set init = 'random'",
            )
    read = [next(batches)]
    if narrow:
        while sum(batch.size for batch in read) < _RANKED_ROWS and (batch := next(batches, None)):
            read.append(batch)
        ranks = ranked_neurons(whole, verifier, read)
        kept = {number: _narrowed(layer, ranks[number][:width].sort().values) for number, layer in whole.items()}
        found |= {f"{name}.{own}": tensor for name, number in layers.items() for own, tensor in kept[number].items()}
    drafter.load_state_dict(state | {name: tensor.to(torch.float32) for name, tensor in found.items()})
    drafter.to(verifier.model.device)
    name, number = [*layers.items()][-1]
    last = _with_feed_forward(drafter.get_submodule(name), whole[number])  # type: ignore[arg-type]
    _check_last_layer(last, drafter.norm, verifier, read[0])  # type: ignore[arg-type]
    return read


def ranked_neurons(numbers: Iterable[int], verifier: VerifierModel, texts: Iterable[Batch]) -> dict[int, torch.Tensor]:
    """Return the neurons of some layers, those first whose outputs have the largest mean square on texts.

    Rows of the first position count for nothing: in many models they are far larger than all others.
    """
    products = {number: verifier.model.get_decoder().layers[number].mlp.down_proj for number in numbers}
    squares = {one: torch.zeros(one.in_features, device=one.weight.device) for one in products.values()}
    real = torch.zeros(0, dtype=torch.bool)

    def add(product: nn.Module, args: tuple[torch.Tensor]) -> None:
        squares[product].add_(args[0][real].float().square().sum(0))

    hooks = [product.register_forward_pre_hook(add) for product in products.values()]
    try:
        for batch in texts:
            real = torch.arange(batch.tokens.shape[1]) < batch.ends.cpu()[:, None]
            real[:, 0] = False
            run_verifier(verifier.model, batch.tokens.to(verifier.model.device), every_logit=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        number: (squares[product] * product.weight.float().square().sum(0)).argsort(descending=True)
        for number, product in products.items()
    }


def _with_heads(layer: Mapping[str, torch.Tensor], config: LayerConfig) -> dict[str, torch.Tensor]:
    """Return a layer whose key/value heads are repeated for a drafter that has a multiple of them."""
    stored = len(layer.get("k_proj.weight", ()))  # 0 in layers of another form, which do not fit
    again, rest = divmod(config.kv_heads * config.head_dim, stored or 1)
    if rest or again < 2 or not stored:
        return dict(layer)
    return {
        name: tensor.unflatten(0, (-1, config.head_dim)).repeat_interleave(again, 0).flatten(0, 1)
        if name.startswith(("k_proj.", "v_proj."))
        else tensor
        for name, tensor in layer.items()
    }


def _narrowed(layer: Mapping[str, torch.Tensor], kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the feed-forward of a layer with these neurons alone."""
    gate, up, down = (layer[f"{name}.weight"] for name in _FEED_FORWARD)
    return {"gate_proj.weight": gate[kept], "up_proj.weight": up[kept], "down_proj.weight": down[:, kept]}


def _with_feed_forward(layer: DrafterLayer, whole: Mapping[str, torch.Tensor]) -> DrafterLayer:
    """Return a copy of a drafter's layer with all of a verifier's weights."""
    layer = deepcopy(layer)
    for name in _FEED_FORWARD:
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
        raise _other_form()


def _other_form() -> UsageError:
    return UsageError("drafter.init: the verifier's last layer is not of Llama's form", OTHER_INIT)
