"""What can be exported faithfully, and what is refused by name instead of being dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from redraft import names
from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.checkpoint import Checkpoint
from redraft.names import TREE_ATTENTION, Dtype
from redraft.signatures import VerifierShape

_NO_SHAPE = {"architectures", "max_position_embeddings", "rope_theta", "rope_scaling"}
"""Fields of a recipe's shape that are not compared as they are: rotary ones are, in their newer spelling."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su", "yarn_dynamic")
LAYER_TYPES = ("full_attention", "sliding_attention")
DECODERS_ONLY = "redraft exports decoder-only models whose attention goes through transformers' attention interface"


def load_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The architecture's configuration. Raises UnsupportedModelError naming what stands against an export."""
    values = checkpoint.config
    kind = str(values.get("model_type"))
    if "auto_map" in values:
        raise UnsupportedModelError(f"{kind} needs code from its own repository, which is not run")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no architecture {kind!r}", DECODERS_ONLY)
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"config.json of {kind} is invalid ({reason})", "restore the original config.json"
        ) from error
    _check_config(config, kind)
    return config


def check_shape(found: PretrainedConfig, expected: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError naming the first field of a recipe's shape that a checkpoint has otherwise.

    Defaults count, and old and new spellings of one field are the same. How long a text may be is no part of the shape.
    """
    if not expected:
        return
    kind = expected["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no architecture {kind!r}", f"mend [shape] of recipe {source}")
    wanted = CONFIG_MAPPING[kind].from_dict(dict(expected)).to_dict()
    values = found.to_dict()
    rope = {"rope_parameters"} if {"rope_theta", "rope_scaling"} & set(expected) else set()
    fields = ["model_type", *sorted(rope | set(expected) - {"model_type", *_NO_SHAPE})]
    for field in fields:
        if values.get(field) != wanted.get(field):
            raise CheckpointError(
                f"the checkpoint is not what recipe {source} is for: {field} is {values.get(field)!r}, "
                f"expected {wanted.get(field)!r}",
                "give that model's folder, or build the folder without the recipe",
            )


def _check_config(config: PretrainedConfig, kind: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "unknown method")
        raise UnsupportedModelError(f"the checkpoint is quantized ({method})", "give the unquantized checkpoint")
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{kind} is no decoder-only language model", DECODERS_ONLY)
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        raise UnsupportedModelError(
            f"{kind} uses ALiBi position biases, which TreeAttention does not take", DECODERS_ONLY
        )
    for rope in _rope_types(getattr(config, "rope_parameters", None)):
        if rope in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rotary embedding {rope!r} depends on the sequence's length",
                "set rope_type to default, linear, yarn or llama3",
            )
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{kind} has layers of type {layer}, which keep no plain KV cache", DECODERS_ONLY
            )


def _rope_types(parameters: Any) -> list[str]:
    """Every rope type in a configuration, which may nest one set of parameters a layer type."""
    if not isinstance(parameters, dict):
        return []
    nested = [kind for value in parameters.values() for kind in _rope_types(value)]
    return nested + ([parameters["rope_type"]] if "rope_type" in parameters else [])


def verifier_shape(config: PretrainedConfig, context: int | None, dtype: Dtype = "float32") -> VerifierShape:
    """Buffer shapes from the configuration. Raises UsageError when `context` passes the model's own limit."""
    limit = int(config.max_position_embeddings)
    if context is not None and context > limit:
        raise UsageError(
            f"context {context} passes the model's limit of {limit} tokens", f"give --context {limit} or less"
        )
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return VerifierShape(
        int(config.num_hidden_layers),
        int(kv_heads),
        int(head_dim),
        int(config.hidden_size),
        int(config.vocab_size),
        context or limit,
        dtype,
    )


def rope_theta(config: Any) -> float:
    """Base of the rotary embedding; of the full-attention layers, where kinds of layers have their own."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def norm_eps(config: Any) -> float:
    """Epsilon of the norms."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return next((float(v) for name in names if (v := getattr(config, name, None))), 1e-5)


def logit_scale(config: Any) -> float:
    """What the head's product is multiplied by: Cohere's `logit_scale`, one over Granite's `logits_scaling`."""
    return float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", 0) or 1))


def check_taps(taps: tuple[str, ...], layers: int) -> None:
    """Raise UsageError on a feature tap that the model does not have."""
    for tap in taps:
        if tap != names.LAST_TAP and not (tap.isdigit() and int(tap) < layers):
            raise UsageError(f"unknown feature tap {tap!r}", f"use {names.LAST_TAP}, or a layer from 0 to {layers - 1}")


def check_attention(model: ir.Model, config: PretrainedConfig, shape: VerifierShape) -> None:
    """Compare what the traced layers do with what the configuration says: caches and windows."""
    kind = config.model_type
    nodes = [node for node in model.graph if node.op_type == TREE_ATTENTION]
    if len(nodes) != shape.layers:
        raise UnsupportedModelError(
            f"{kind}: {len(nodes)} of {shape.layers} layers keep keys and values through the attention interface",
            DECODERS_ONLY,
        )
    for layer, node in enumerate(nodes):
        kv_heads = node.attributes["kv_heads"].as_int()
        width = node.inputs[0].shape[-1] if node.inputs[0] is not None and node.inputs[0].shape is not None else None
        if (kv_heads, width) != (shape.kv_heads, node.attributes["q_heads"].as_int() * shape.head_dim):
            raise UnsupportedModelError(
                f"{kind}: layer {layer} keeps {kv_heads} key heads under queries {width} wide, config.json says "
                f"{shape.kv_heads} heads of {shape.head_dim}"
            )
        window, expected = node.attributes["window"].as_int(), _window(config, layer)
        if window != expected:
            raise UnsupportedModelError(
                f"{kind}: layer {layer} should have a sliding window of {expected} and hands {window} to its attention",
                DECODERS_ONLY,
            )


def _window(config: PretrainedConfig, layer: int) -> int:
    """The sliding window of a layer by the configuration, 0 for none."""
    window = getattr(config, "sliding_window", None) or 0
    if not getattr(config, "use_sliding_window", True):
        return 0
    types = getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else 0


def tied_names(network: nn.Module) -> dict[str, str]:
    """Parameters that share another one's storage: name -> the name that checkpoints store."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
            tied[owner] = name
    return tied


def vocabulary_parameters(network: nn.Module) -> tuple[str, str]:
    """Names of the embedding's and of the head's weight; of tied ones the first, as graphs name them."""
    shared = [network.get_input_embeddings().weight, network.get_output_embeddings().weight]  # type: ignore[operator]
    embedding, head = (
        next(name for name, p in network.named_parameters(remove_duplicate=False) if p is weight) for weight in shared
    )
    return embedding, head
