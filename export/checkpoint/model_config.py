"""A checkpoint's transformers configuration: its sizes by one name, and refusals of what cannot be exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.checkpoint.architecture import DECODERS_ONLY, Architecture
from redraft.export.checkpoint.base import AnyCheckpoint, last_line
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
        raise CheckpointError(
            f"config.json of {kind} is invalid ({last_line(error)})", "restore the original config.json"
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


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder. `head_dim` is the size of one attention head, `hidden` the size of a hidden state."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int


def decoder_shape(config: PretrainedConfig) -> DecoderShape:
    """Return the sizes of the decoder in `config`, or of a multimodal configuration's text decoder.

    Raises UnsupportedModelError if a size is missing or differs from layer to layer.
    """
    text = config.get_text_config(decoder=True)
    heads, hidden = _size(text, "num_attention_heads"), _size(text, "hidden_size")
    return DecoderShape(
        layers=_size(text, "num_layers"),
        heads=heads,
        kv_heads=_size(text, "num_key_value_heads", heads),
        head_dim=_size(text, "head_dim", hidden // heads),
        hidden=hidden,
        vocabulary=_size(text, "vocab_size"),
    )


def _size(config: PretrainedConfig, name: str, default: int | None = None) -> int:
    """Return a size by optimum's name for it. Optimum falls back on the `attribute_map` of transformers."""
    kind = config.model_type
    normalized: Any
    try:
        normalized = NormalizedConfigManager.get_normalized_config_class(kind)
    except KeyError:  # an architecture unknown to optimum, which then looks up unchanged names
        normalized = NormalizedTextConfig
    try:
        size: Any = getattr(normalized(config), name, default)
    except AmbiguousGlobalPerLayerAttributeError:
        raise UnsupportedModelError(f"{kind}: {name} differs from layer to layer") from None
    if size is None and name == "num_attention_heads":
        raise UnsupportedModelError(f"{kind} has no attention heads, so it keeps no keys and values", DECODERS_ONLY)
    if not isinstance(size, int):
        raise UnsupportedModelError(f"{kind}: config.json should give {name} as one integer, found {size!r}")
    return size
