"""Conversion of published draft checkpoints. `redraft.export.drafters.published` has their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from redraft.errors import CheckpointError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.base import AnyCheckpoint, read_json_object
from redraft.export.checkpoint.model_config import decoder_shape
from redraft.export.drafters.checkpoint import CONFIG_FILE, DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.feature_drafter import FeatureConfig, FeatureDrafter
from redraft.export.drafters.layer import DrafterConfig, verifier_sizes
from redraft.export.drafters.published import (
    FIRST,
    KNOWN,
    THIRD,
    Published,
    nested,
    recognise,
    states_of,
)
from redraft.export.drafters.published_block import LAYERS, block_drafter
from redraft.export.drafters.published_checks import (
    check_features,
    check_matrix,
    check_sizes,
    check_tensors,
    draft_vocabulary,
    layer_configuration,
)
from redraft.export.drafters.published_tensors import BIASES, HEAD, IN_LAYER, PublishedTensors

_FUSION = "fusion.projection.weight"
_FUSION_BIAS = "fusion.projection.bias"


def convert(path: Path, verifier: AnyCheckpoint, identity: Identity, out: Path) -> DrafterCheckpoint:
    """Write the published draft checkpoint in `path` as a drafter's folder `out`, in bf16. Returns the drafter.

    It has no counts of tokens: all are 1. Memory is the drafter's in bf16 and one more tensor. Raises CheckpointError
    if the checkpoint has another layout, does not fit the verifier, or has a part that redraft's drafters do not have.
    """
    published = recognise(path)
    if published is None:
        raise CheckpointError(
            f"{path} is no published drafter of a known layout",
            f"give a folder of {KNOWN}",
        )
    values = read_json_object(path / CONFIG_FILE)
    target = model_config.load_config(verifier)
    stored = PublishedTensors.open(path)
    config, module, vocabulary = (
        block_drafter(path, values, target, stored, verifier)
        if published.drafts_blocks
        else _drafter(published, values, target, stored, verifier)
    )
    counts = torch.ones(config.vocab_size, dtype=torch.long)
    training = {"published": published.description, "folder": path.name}
    save_drafter(out, published.method, config, identity, module, counts, training, vocabulary)
    return DrafterCheckpoint.open(out)


def _drafter(
    published: Published, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors,
    verifier: AnyCheckpoint,
) -> tuple[DrafterConfig, nn.Module, torch.Tensor | None]:  # fmt: skip
    """Return the drafter that predicts features of a published checkpoint, and its draft vocabulary."""
    config = _configuration(published, values, target, stored)
    names = _names(published, config, values, stored)
    shapes = {names[ours]: tuple(t.shape) for ours, t in _module(config).state_dict().items() if ours in names}
    check_tensors(stored, config, shapes)
    vocabulary = draft_vocabulary(stored, config)
    check_matrix(stored, verifier, target)
    return config, _filled(config, stored, names), vocabulary


def _configuration(
    published: Published, values: Mapping[str, Any], target: PretrainedConfig, stored: PublishedTensors
) -> FeatureConfig:
    """Return the drafter's configuration. Raises CheckpointError if it does not fit the verifier or our module."""
    path, shape = published.path, decoder_shape(target)
    config = layer_configuration(path, values.get(LAYERS, values))
    found = decoder_shape(config)
    check_sizes(path, values, config, target)
    layernorms = bool(values.get("layernorms")), "norms of the embedding and before the head (layernorms)"
    check_features(path, config, layernorms)
    own_head = HEAD in stored.shapes
    sizes = verifier_sizes(config, found.vocabulary)
    sizes["logit_scale"] = 1.0 if own_head else model_config.logit_scale(target)
    if published.method == FIRST:
        return FeatureConfig(**sizes, input_norm=False, own_head=own_head, qkv_bias=_option(values, "qkv_bias"))
    drafted = int(values.get("draft_vocab_size") or found.vocabulary)
    return FeatureConfig(
        **sizes,
        fusion="attention",
        outputs="normed_back" if _option(values, "norm_output", "return_hidden_post_norm") else "normed",
        hidden_states=states_of(path, values, shape.layers),
        feature_norms=_option(values, "fc_norm"),
        joint_norm=_option(values, "norm_before_fc"),
        own_head=own_head,
        normed_residual=_option(values, "norm_before_residual"),
        draft_vocab_size=0 if drafted == found.vocabulary else drafted,
    )


def _option(values: Mapping[str, Any], *names: str) -> bool:
    """Return True if the configuration, or its `eagle_config`, sets one of the options."""
    return any(bool(place.get(name)) for place in (values, nested(values)) for name in names)


def _names(
    published: Published, config: FeatureConfig, values: Mapping[str, Any], stored: PublishedTensors
) -> dict[str, str]:
    """Return the published name of each of our parameters. It has no name if the published drafter has no such bias."""
    third, speculators = published.method == THIRD, published.layout == "speculators"
    layer = "midlayer." if third and any(name.startswith("midlayer.") for name in stored.shapes) else "layers.0."
    if speculators and not third:
        layer = "transformer."
    in_layer = IN_LAYER | BIASES if config.qkv_bias else IN_LAYER
    names = {ours: f"{layer}{theirs}" for ours, theirs in in_layer.items()}
    if config.own_head:
        names["head.weight"] = HEAD
    if third:
        norms = {f"feature_norms.{i}.weight": f"fc_norm.{i}.weight" for i in range(len(config.hidden_states))}
        return {
            **names,
            "fusion.embedding_norm.weight": f"{layer}input_layernorm.weight",
            "fusion.feature_norm.weight": f"{layer}hidden_norm.weight",
            "norm.weight": "norm.weight",
            **({"features.weight": "fc.weight"} if len(config.hidden_states) > 1 else {}),
            **(norms if config.feature_norms else {}),
            **({"joint_norm.weight": "input_norm.weight"} if config.joint_norm else {}),
        }
    fc, option = ("fusion_fc", "fusion_bias") if speculators else ("fc", "bias")
    names[_FUSION] = f"{fc}.weight"
    if values.get(option, f"{fc}.bias" in stored.shapes):
        names[_FUSION_BIAS] = f"{fc}.bias"
    return names


def _module(config: FeatureConfig) -> FeatureDrafter:
    """Return the module in bf16 without numbers."""
    with torch.device("meta"):
        return FeatureDrafter(config).to(torch.bfloat16)


def _filled(config: FeatureConfig, stored: PublishedTensors, names: Mapping[str, str]) -> FeatureDrafter:
    """Return the module in bf16 with the published numbers."""
    module = _module(config).to_empty(device="cpu").requires_grad_(False)
    for ours, parameter in module.state_dict().items():
        if ours not in names:
            parameter.zero_()
            continue
        numbers = stored.numbers(names[ours])
        parameter.copy_(numbers.roll(config.hidden_size, 1) if ours == _FUSION else numbers)
    return module
