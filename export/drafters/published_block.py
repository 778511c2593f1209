"""Published drafters that draft a block in one pass: their layouts, and their conversion.

| layout      | project                  | forms          | recognised by                                             |
|-------------|--------------------------|----------------|-----------------------------------------------------------|
| z-lab       | z-lab/dflash             | DFlash         | `dflash_config`, or the architecture `DFlashDraftModel`   |
| z-lab       | hao-ai-lab/JetSpec       | JetSpec        | the same, and `causal_head` in `dflash_config`            |
| deepspec    | deepseek-ai/DeepSpec     | DSpark         | the architecture `Qwen3DSparkModel`                       |
| speculators | vllm-project/speculators | DFlash, DSpark | `speculators_model_type`, `dflash` or `dspark`            |

Settings are in config.json itself, z-lab's in its `dflash_config` too. The layers of speculators have a
`transformer_layer_config` of their own.

Tensors are `layers.N.*` as in transformers' Qwen3, `fc`, `hidden_norm` and `norm`, with `markov_rank` also
`markov_head.markov_w1` and `markov_w2`, with `enable_confidence_head` `confidence_head.proj`. DeepSpec and speculators
add copies of the verifier's embedding and head, speculators those rows of the head that `d2t` names.

A block of B rows drafts B - 1 tokens, or B if its anchor predicts: DeepSpec's, and speculators' if
`sample_from_anchor` is true. Files without it are older; no anchor predicted then. A DSpark of speculators whose anchor
does not predict has DFlash's blocks, with its bias and confidence.

Id 3 of `target_layer_ids` is the output of layer 3, from 0. That of the last layer is the state after the final norm,
as transformers returns it. Without ids, a drafter of one layer reads that of L / 2. Those of several layers are spread
from 1 to L - 3. Id 3 of speculators' `aux_hidden_state_layer_ids` is what enters layer 3, and no state is after the
final norm. Without them, they are 2, L / 2 and L - 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
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
    draft_vocabulary,
    layer_configuration,
    verifier_matrix,
)
from redraft.export.drafters.published_tensors import EMBEDDING, HEAD, IN_LAYER, PublishedTensors
from redraft.methods import ROWS
from redraft.names import LAST_HIDDEN_STATE

BlockLayout = Literal["z-lab", "deepspec", "speculators"]
_MASKS, _AFTER_TOKENS = "DFlashDraftModel", "Qwen3DSparkModel"
KIND, LAYERS = "speculators_model_type", "transformer_layer_config"
"""Keys of speculators' configurations: the drafter's form, and its layers' configuration."""
_FORMS = {
    (bool(row.form.get("causal")), bool(row.form.get("anchor_predicts"))): name
    for name, row in ROWS.items()
    if row.family == "block"
}
_KINDS = _FORMS[False, False], _FORMS[False, True]
"""Speculators' words for its forms, which are our methods' names. The second has a bias and a confidence by default."""
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


def recognise_block(values: Mapping[str, Any]) -> tuple[str, BlockLayout] | None:
    """Return the method and the layout of a configuration of a drafter that drafts blocks; None for any other."""
    if not (layout := _layout(values)):
        return None
    own = _settings(values)
    return _FORMS[own["causal"], own["anchor_predicts"]], layout


def _layout(values: Mapping[str, Any]) -> BlockLayout | None:
    architectures = values.get("architectures") or ()
    if KIND in values:
        return "speculators" if values[KIND] in _KINDS else None
    if _MASKS in architectures or isinstance(values.get("dflash_config"), dict):
        return "z-lab"
    return "deepspec" if _AFTER_TOKENS in architectures else None


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration of any layout, with the layout's defaults, `causal`, `anchor_predicts`."""
    layout, own = _layout(values), dict(values)
    if values.get(KIND) == _KINDS[1]:
        own = {"markov_rank": 256, "enable_confidence_head": True, **own}
    if layout == "z-lab" and isinstance(nested := values.get("dflash_config"), dict):
        own |= nested
    own["causal"] = layout == "z-lab" and bool(own.get("causal_head"))
    own["anchor_predicts"] = layout == "deepspec" or (layout == "speculators" and bool(own.get("sample_from_anchor")))
    return own


def block_states(path: Path, values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the names of the hidden states that the drafter reads from a verifier of `layers` layers.

    Raises CheckpointError for other ids than different layers of the verifier.
    """
    own = _settings(values)
    entered = KIND in own  # ids are layers that a state enters
    ids = own.get("aux_hidden_state_layer_ids" if entered else "target_layer_ids")
    count = own.get("num_hidden_layers", 1)
    if not ids and entered:
        ids = [2, layers // 2, layers - 3]
    elif not ids:
        ids = _spread(layers, count) if isinstance(count, int) and count > 0 else []
    whole = isinstance(ids, list) and ids and all(isinstance(layer, int) for layer in ids)
    ids = [layer - entered for layer in ids] if whole else ids
    if whole and min(ids) == -1:
        raise CheckpointError(f"{path} reads embeddings (layer -1), which redraft's drafters do not", NOT_COVERED)
    if not whole or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= layers:
        raise CheckpointError(
            f"{path} reads the outputs of layers {ids}, expected different layers from 0 to {layers - 1}",
            OTHER_VERIFIER,
        )
    return tuple(LAST_HIDDEN_STATE if layer == layers - 1 and not entered else str(layer) for layer in ids)


def block_drafter(
    path: Path, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors, verifier: AnyCheckpoint
) -> tuple[BlockConfig, BlockDrafter, torch.Tensor | None]:
    """Return the drafter of a published checkpoint, in bf16, and its draft vocabulary, None for the whole one.

    Raises CheckpointError if it does not fit the verifier, or has a part that redraft's drafters do not have.
    """
    own = _settings(values)
    embedding = Architecture.of(target).empty_model().get_input_embeddings()
    if type(embedding) is not torch.nn.Embedding:
        raise CheckpointError(
            f"{path} reads embeddings that its verifier has scaled ({type(embedding).__name__}); redraft's drafters "
            "read them as they are", NOT_COVERED,
        )  # fmt: skip
    config = _configuration(path, values, target, stored)
    with torch.device("meta"):
        module = BlockDrafter(config).to(torch.bfloat16)
    names = {ours: _published_name(ours) for ours in module.state_dict() if ours != "mask"}
    shapes = {names[ours]: tuple(tensor.shape) for ours, tensor in module.state_dict().items() if ours in names}
    after_state = config.confidence and not own.get("confidence_head_with_markov", True)
    if after_state:
        shapes["confidence_head.proj.weight"] = 1, config.hidden_size
    check_tensors(stored, config, shapes)
    vocabulary = draft_vocabulary(stored, config)
    check_matrix(stored, verifier, target)
    check_matrix(stored, verifier, target, HEAD, vocabulary)
    module = module.to_empty(device="cpu").requires_grad_(False)
    for ours, name in names.items():
        numbers = stored.numbers(name)
        if after_state and ours == "confidence.weight":  # this head does not read the token before
            numbers = F.pad(numbers, (0, config.token_rank))
        module.get_parameter(ours).copy_(numbers)
    token = _mask_token(path, own, config.vocab_size)
    source, parameter_name = verifier_matrix(verifier, target, EMBEDDING, (config.vocab_size, config.hidden_size))
    module.mask.copy_(torch.from_numpy(source.rows(parameter_name, token, token + 1))[0])
    return config, module, vocabulary


def _configuration(
    path: Path, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors
) -> BlockConfig:
    """Return the drafter's configuration. Raises CheckpointError if it does not fit the verifier or our module."""
    shape, own = decoder_shape(target), _settings(values)
    anchor_predicts = own["anchor_predicts"]
    config = layer_configuration(path, values.get(LAYERS, values))
    check_sizes(path, own, config, target)
    rank = 0 if own.get("markov_rank") is None else own["markov_rank"]
    if type(rank) is not int or rank < 0:
        raise CheckpointError(f"{path / CONFIG_FILE}: markov_rank {rank!r} is no number of columns", FITTING)
    head = own.get("markov_head_type", "vanilla")
    check_features(path, config, (rank > 0 and head != "vanilla", f"a Markov head of type {head!r}"))
    expected = own.get("num_target_layers", shape.layers)
    if expected != shape.layers:
        raise CheckpointError(f"{path} is for a verifier of {expected} layers, not {shape.layers}", OTHER_VERIFIER)
    found, block = decoder_shape(config), own.get("block_size")
    if not isinstance(block, int) or block <= (not anchor_predicts):
        raise CheckpointError(f"{path / CONFIG_FILE}: block_size {block!r} is no number of a block's rows", FITTING)
    drafted = own.get("draft_vocab_size") or found.vocabulary
    if not isinstance(drafted, int) or not 0 < drafted <= found.vocabulary:
        raise CheckpointError(f"{path / CONFIG_FILE}: draft_vocab_size {drafted!r} is no number of tokens", FITTING)
    sizes = verifier_sizes(config, found.vocabulary)
    return BlockConfig(
        **{**sizes, "logit_scale": model_config.logit_scale(target)},
        layers=found.layers,
        steps=block if anchor_predicts else block - 1,
        causal=own["causal"],
        anchor_predicts=anchor_predicts,
        token_rank=rank,
        confidence=bool(own.get("enable_confidence_head")),
        head_norms="layers.0.self_attn.q_norm.weight" in stored.shapes,
        qkv_bias="layers.0.self_attn.q_proj.bias" in stored.shapes,
        hidden_states=block_states(path, values, shape.layers),
        draft_vocab_size=0 if drafted == found.vocabulary else drafted,
    )


def _mask_token(path: Path, own: Mapping[str, Any], vocabulary: int) -> int:
    """Return the token whose embedding masks have. Raises CheckpointError if there is no such token."""
    token = own.get("mask_token_id")
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        raise CheckpointError(
            f"{path / CONFIG_FILE}: mask_token_id {token!r} is no token of the verifier, from 0 to {vocabulary - 1}",
            FITTING,
        )
    return token


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
