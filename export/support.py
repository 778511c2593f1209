"""Refuse by name everything that an export would silently drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from redraft import names
from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.architecture import DECODERS_ONLY, Architecture
from redraft.export.attention import LayerAttention
from redraft.export.checkpoint import AnyCheckpoint
from redraft.export.shapes import decoder_shape
from redraft.names import Dtype
from redraft.signatures import VerifierShape

_NO_SHAPE = {"architectures", "max_position_embeddings", "rope_theta", "rope_scaling"}
"""Fields of a recipe's shape that are not compared directly. Rotary ones are compared in their newer spelling."""
LONG_ROPE = ("longrope", "su")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
SAME_AS = {"mimo": "qwen2"}
"""Architectures that transformers lacks but computes under another name, by their `model_type`.

MiMo-7B is Qwen2 and a module that predicts several tokens (its repository's modeling_mimo.py).
"""


def load_config(checkpoint: AnyCheckpoint) -> PretrainedConfig:
    """Return the architecture's configuration. Raises UnsupportedModelError naming a reason against an export."""
    values = checkpoint.config
    kind = str(values.get("model_type"))
    if kind in SAME_AS:
        kind = SAME_AS[kind]
        values = {**values, "model_type": kind, "auto_map": {}}
    elif "auto_map" in values:
        raise UnsupportedModelError(f"{kind} needs code from its own repository, which redraft does not run")
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
    _check_config(Architecture.of(config).text, kind)
    return config


def check_shape(found: PretrainedConfig, expected: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError naming the first field in which a checkpoint differs from a recipe's shape.

    Missing fields have their defaults, and old and new spellings of a field are equal. So are numbers that fp32 rounds
    alike, since GGUF files store fp32. The shape does not include the context length.
    """
    if not expected:
        return
    kind = expected["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(f"transformers knows no architecture {kind!r}", f"fix [shape] of recipe {source}")
    wanted = CONFIG_MAPPING[kind].from_dict(dict(expected)).to_dict()
    values = found.to_dict()
    rope = {"rope_parameters"} if {"rope_theta", "rope_scaling"} & set(expected) else set()
    fields = ["model_type", *sorted(rope | set(expected) - {"model_type", *_NO_SHAPE})]
    for field in fields:
        if _in_fp32(values.get(field)) != _in_fp32(wanted.get(field)):
            raise CheckpointError(
                f"the checkpoint does not fit recipe {source}: {field} is {values.get(field)!r}, "
                f"expected {wanted.get(field)!r}",
                "give that model's folder, or build the folder without the recipe",
            )


def _in_fp32(value: Any) -> Any:
    """Return a configuration's value with every number that is no integer rounded to fp32."""
    if isinstance(value, dict):
        return {key: _in_fp32(item) for key, item in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


def _check_config(config: PretrainedConfig, kind: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "unknown method")
        raise UnsupportedModelError(f"the checkpoint is quantized ({method})", "give the unquantized checkpoint")
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{kind} has layers without a plain KV cache ({layer}), which redraft does not export"
            )


def check_rope(config: PretrainedConfig, positions: int) -> None:
    """Raise UnsupportedModelError if a rotary embedding changes with the length of texts of `positions` tokens.

    LongRoPE (arXiv 2402.13753) rotates all tokens of a text differently once it passes the original length, so that
    earlier keys would have to be computed again. Shorter texts are exact.
    """
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope.get("rope_type") in LONG_ROPE and limit and positions > int(limit):
            raise UnsupportedModelError(
                f"{config.model_type} changes its rotary embedding in texts of more than {limit} tokens",
                f"give --max-model-len {limit} or less",
            )


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Return every set of rotary parameters in a configuration, which may nest one for each layer type."""
    if not isinstance(parameters, dict):
        return []
    nested = [rope for value in parameters.values() for rope in _ropes(value)]
    return nested + ([parameters] if "rope_type" in parameters else [])


def is_rotary(config: PretrainedConfig) -> bool:
    """Return True if the model rotates by position, so that texts beyond its limit cost accuracy only."""
    return bool(_ropes(getattr(config, "rope_parameters", None)))


def longest_text(config: PretrainedConfig) -> int | None:
    """Return the model's limit of tokens; None if it names none."""
    return next((int(value) for name in _LIMITS if (value := getattr(config, name, None))), None)


def verifier_shape(config: PretrainedConfig, max_model_len: int | None, dtype: Dtype = "float32") -> VerifierShape:
    """Return buffer shapes from the configuration. Raises UsageError if `max_model_len` passes the model's limit."""
    limit = longest_text(config) or max_model_len or DEFAULT_MAX_MODEL_LEN
    if max_model_len is not None and max_model_len > limit:
        raise UsageError(
            f"context {max_model_len} passes the model's limit of {limit} tokens",
            f"give --max-model-len {limit} or less",
        )
    shape = decoder_shape(config)
    return VerifierShape(
        shape.layers, shape.kv_heads, shape.head_dim, shape.hidden, shape.vocabulary, max_model_len or limit, dtype
    )


_LIMITS = ("max_position_embeddings", "max_seq_len", "seq_length")
DEFAULT_MAX_MODEL_LEN = 2048
"""Default of `max_model_len` for a model that names no limit."""


def rope_theta(config: Any) -> float:
    """Return the base of the rotary embedding, that of full-attention layers if layer types differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def norm_eps(config: Any) -> float:
    """Return the epsilon of the norms."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return next((float(v) for name in names if (v := getattr(config, name, None))), 1e-5)


def logit_scale(config: Any) -> float:
    """Return the factor on the head's product: Cohere's `logit_scale`, or one over Granite's `logits_scaling`."""
    return float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", 0) or 1))


def check_hidden_states(hidden_states: tuple[str, ...], layers: int) -> None:
    """Raise UsageError on a hidden state that the model does not have."""
    known = {names.LAST_HIDDEN_STATE, *map(str, range(layers))}
    for hidden_state in hidden_states:
        if hidden_state not in known:
            raise UsageError(
                f"unknown hidden state {hidden_state!r}",
                f"use {names.LAST_HIDDEN_STATE}, or a layer from 0 to {layers - 1}",
            )


def with_layers(shape: VerifierShape, config: PretrainedConfig, layers: Sequence[LayerAttention]) -> VerifierShape:
    """Return the shape with the KV buffers of all layers. Raises UnsupportedModelError if no shape fits them all.

    Layers with fewer key heads or smaller heads than others are padded to the largest.
    """
    kind = config.model_type
    if len(layers) != shape.layers:
        raise UnsupportedModelError(
            f"{kind}: only {len(layers)} of {shape.layers} layers keep keys and values by the attention interface",
            DECODERS_ONLY,
        )
    kv_heads, head_dim = max(layer.kv_heads for layer in layers), max(layer.head_dim for layer in layers)
    for number, layer in enumerate(layers):
        if kv_heads % layer.kv_heads or layer.q_heads % kv_heads:
            raise UnsupportedModelError(
                f"{kind}: layer {number} has {layer.q_heads} query heads and {layer.kv_heads} key heads, "
                f"others have {kv_heads} key heads"
            )
    return replace(shape, kv_heads=kv_heads, head_dim=head_dim)


def check_positions(model: ir.Model, config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError if the traced model counts positions itself and ignores its `positions` input."""
    common.RemoveUnusedNodesPass()(model)
    counted = [node for node in model.graph if node.op_type in ("Range", "CumSum") and _counts(node)]
    if counted:
        raise UnsupportedModelError(
            f"{config.model_type} counts token positions itself, which is wrong for the nodes of a token tree",
            DECODERS_ONLY,
        )


def _counts(node: ir.Node) -> bool:
    """Return True if the model's code makes positions, not a constant or the index of a translated slice write."""
    written = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    return any(name in written for name in ("aten.arange", "aten.cumsum")) and not _is_constant(node)


def _is_constant(node: ir.Node) -> bool:
    """Return True if all inputs of a node are constants."""
    return all(value is None or value.const_value is not None or _made_of_constants(value) for value in node.inputs)


def _made_of_constants(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and (node.op_type == "Constant" or (bool(node.inputs) and _is_constant(node)))


def tied_names(network: nn.Module) -> dict[str, str]:
    """Return parameters that share another one's storage: name -> the name in checkpoints."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
            tied[owner] = name
    return tied


def vocabulary_parameters(network: nn.Module) -> tuple[str, str]:
    """Return the names of the embedding's and the head's weight. Tied weights have the first name, as in graphs."""
    shared = [network.get_input_embeddings().weight, network.get_output_embeddings().weight]  # type: ignore[operator]
    embedding, head = (
        next(name for name, p in network.named_parameters(remove_duplicate=False) if p is weight) for weight in shared
    )
    return embedding, head
