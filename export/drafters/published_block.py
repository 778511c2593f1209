"""Published drafters that draft a block in one pass: their layouts, and their conversion.

| layout   | project              | architecture       | forms   | config.json                                        |
|----------|----------------------|--------------------|---------|----------------------------------------------------|
| z-lab    | z-lab/dflash         | `DFlashDraftModel` | DFlash  | `block_size`, `num_target_layers`, `dflash_config` |
| z-lab    | hao-ai-lab/JetSpec   | `DFlashDraftModel` | JetSpec | the same, with `causal_head` in `dflash_config`    |
| deepspec | deepseek-ai/DeepSpec | `Qwen3DSparkModel` | DSpark  | `block_size`, `target_layer_ids`, `mask_token_id`, |
|          |                      |                    |         | `markov_rank`, `enable_confidence_head`            |

`dflash_config` has `mask_token_id` and `target_layer_ids`. Tensors are `layers.N.*` as in transformers' Qwen3, `fc`,
`hidden_norm` and `norm`. DSpark also has `markov_head.markov_w1`, `markov_head.markov_w2` and `confidence_head.proj`,
and copies of the verifier's embedding and head.

A block of B rows drafts B - 1 tokens, DSpark's B. Id 3 of `target_layer_ids` is the output of layer 3, from 0. That of
the last layer is the state after the final norm, as transformers returns it. Without ids, a drafter of one layer reads
that of L / 2. Those of several layers are spread from 1 to L - 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.block_drafter import BlockConfig, BlockDrafter
from redraft.export.drafters.checkpoint import CONFIG_FILE
from redraft.export.drafters.layer import verifier_sizes
from redraft.export.drafters.published_checks import (
    FITTING,
    NOT_COVERED,
    OTHER_VERIFIER,
    check_features,
    check_matrix,
    check_sizes,
    check_tensors,
    layer_configuration,
    verifier_matrix,
)
from redraft.export.drafters.published_tensors import EMBEDDING, HEAD, IN_LAYER, PublishedTensors
from redraft.methods import ROWS
from redraft.names import LAST_HIDDEN_STATE

BlockLayout = Literal["z-lab", "deepspec"]
BLOCKS: Mapping[str, str] = {"z-lab": "z-lab's", "deepspec": "DeepSpec's"}
"""The layouts and their owners."""
_MASKS, _AFTER_TOKENS = "DFlashDraftModel", "Qwen3DSparkModel"
_NESTED = "dflash_config"
_FORMS = {
    (bool(row.form.get("causal")), bool(row.form.get("anchor_predicts"))): name
    for name, row in ROWS.items()
    if row.family == "block"
}
_OWN = {
    "features.weight": "fc.weight",
    "feature_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
    "tokens.weight": "markov_head.markov_w1.weight",
    "token_head.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
_LAYER = {ours.removeprefix("layer."): theirs for ours, theirs in IN_LAYER.items()} | {
    "input_norm.weight": "input_layernorm.weight",
    **{f"{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"},
    **{f"{one}_proj.bias": f"self_attn.{one}_proj.bias" for one in "qkv"},
}
"""Published names of our parameters, those of a layer after its prefix. The mask is a row of the embedding."""


class _Published(Protocol):
    """The parts of `redraft.export.drafters.published.Published` that are read."""

    @property
    def path(self) -> Path: ...
    @property
    def layout(self) -> str: ...


def recognise_block(values: Mapping[str, Any]) -> tuple[str, BlockLayout] | None:
    """Return the method and the layout of a configuration of a drafter that drafts blocks; None for any other."""
    architectures = values.get("architectures") or ()
    if _MASKS in architectures or isinstance(values.get(_NESTED), dict):
        return _FORMS[bool(_nested(values).get("causal_head")), False], "z-lab"
    return (_FORMS[False, True], "deepspec") if _AFTER_TOKENS in architectures else None


def block_states(path: Path, values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the names of the hidden states that the drafter reads from a verifier of `layers` layers.

    Raises CheckpointError for other ids than different layers of the verifier.
    """
    ids = _nested(values).get("target_layer_ids") or values.get("target_layer_ids")
    count = values.get("num_hidden_layers", 1)
    ids = ids or (_spread(layers, count) if isinstance(count, int) and count > 0 else [])
    whole = isinstance(ids, list) and ids and all(isinstance(layer, int) for layer in ids)
    if whole and min(ids) == -1:
        raise CheckpointError(f"{path} reads embeddings (layer -1), which redraft's drafters do not", NOT_COVERED)
    if not whole or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= layers:
        raise CheckpointError(
            f"{path} reads the outputs of layers {ids}, expected different layers from 0 to {layers - 1}",
            OTHER_VERIFIER,
        )
    return tuple(LAST_HIDDEN_STATE if layer == layers - 1 else str(layer) for layer in ids)


def block_drafter(
    published: _Published, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors,
    verifier: AnyCheckpoint,
) -> tuple[BlockConfig, BlockDrafter, None]:  # fmt: skip
    """Return the drafter of a published checkpoint, in bf16. Its draft vocabulary is the whole one.

    Raises CheckpointError if it does not fit the verifier, or has a part that redraft's drafters do not have.
    """
    config = _configuration(published, values, target, stored)
    with torch.device("meta"):
        module = BlockDrafter(config).to(torch.bfloat16)
    names = {ours: _published_name(ours) for ours in module.state_dict() if ours != "mask"}
    shapes = {names[ours]: tuple(tensor.shape) for ours, tensor in module.state_dict().items() if ours in names}
    size = config.vocab_size, config.hidden_size
    shapes |= {name: size for name in (EMBEDDING, HEAD) if name in stored.shapes}
    after_state = config.confidence and not values.get("confidence_head_with_markov", True)
    if after_state:
        shapes["confidence_head.proj.weight"] = 1, config.hidden_size
    check_tensors(stored, shapes)
    for name in (EMBEDDING, HEAD):
        check_matrix(stored, verifier, target, name)
    module = module.to_empty(device="cpu").requires_grad_(False)
    for ours, name in names.items():
        numbers = stored.numbers(name)
        if after_state and ours == "confidence.weight":  # this head does not read the token before
            numbers = F.pad(numbers, (0, config.token_rank))
        module.get_parameter(ours).copy_(numbers)
    token = _mask_token(published.path, values, config.vocab_size)
    source, parameter_name = verifier_matrix(verifier, target, EMBEDDING, size)
    module.mask.copy_(torch.from_numpy(source.rows(parameter_name, token, token + 1))[0])
    return config, module, None


def _configuration(
    published: _Published, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors
) -> BlockConfig:
    """Return the drafter's configuration. Raises CheckpointError if it does not fit the verifier or our module."""
    path, shape, after_tokens = published.path, decoder_shape(target), published.layout == "deepspec"
    config = layer_configuration(path, values)
    check_sizes(path, {**values, **_nested(values)}, config, target)
    rank = 0 if not after_tokens or values.get("markov_rank") is None else values["markov_rank"]
    if type(rank) is not int or rank < 0:
        raise CheckpointError(f"{path / CONFIG_FILE}: markov_rank {rank!r} is no number of columns", FITTING)
    head = values.get("markov_head_type", "vanilla")
    check_features(path, config, (rank > 0 and head != "vanilla", f"a Markov head of type {head!r}"))
    expected = values.get("num_target_layers", shape.layers)
    if expected != shape.layers:
        raise CheckpointError(f"{path} is for a verifier of {expected} layers, not {shape.layers}", OTHER_VERIFIER)
    found, block = decoder_shape(config), values.get("block_size")
    if not isinstance(block, int) or block <= (not after_tokens):
        raise CheckpointError(f"{path / CONFIG_FILE}: block_size {block!r} is no number of a block's rows", FITTING)
    sizes = verifier_sizes(config, found.vocabulary)
    return BlockConfig(
        **{**sizes, "logit_scale": model_config.logit_scale(target)},
        layers=found.layers,
        steps=block if after_tokens else block - 1,
        causal=bool(_nested(values).get("causal_head")),
        anchor_predicts=after_tokens,
        token_rank=rank,
        confidence=after_tokens and bool(values.get("enable_confidence_head")),
        head_norms="layers.0.self_attn.q_norm.weight" in stored.shapes,
        qkv_bias="layers.0.self_attn.q_proj.bias" in stored.shapes,
        hidden_states=block_states(path, values, shape.layers),
    )


def _mask_token(path: Path, values: Mapping[str, Any], vocabulary: int) -> int:
    """Return the token whose embedding masks have. Raises CheckpointError if there is no such token."""
    token = {**values, **_nested(values)}.get("mask_token_id")
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: mask_token_id {token!r} is no token of the verifier, from 0 to {vocabulary - 1}",
            FITTING,
        )
    return token


def _nested(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = values.get(_NESTED)
    return found if isinstance(found, dict) else {}


def _spread(layers: int, drafted: int) -> list[int]:
    """Return the ids of a drafter without ids, of so many layers."""
    if drafted == 1:
        return [layers // 2]
    return [round(1 + place * (layers - 4) / (drafted - 1)) for place in range(drafted)]


def _published_name(ours: str) -> str:
    """Return the published name of a parameter."""
    if not ours.startswith("layers."):
        return _OWN[ours]
    number, _, name = ours.removeprefix("layers.").partition(".")
    return f"layers.{number}.{_LAYER[name]}"
