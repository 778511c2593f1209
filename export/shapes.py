"""Read a decoder's sizes from its configuration, whatever names the architecture uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig
from transformers import PretrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from redraft.errors import UnsupportedModelError
from redraft.export.architecture import DECODERS_ONLY


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
    try:
        found: Any = getattr(_normalized(config), name, default)
    except AmbiguousGlobalPerLayerAttributeError:
        raise UnsupportedModelError(f"{kind}: {name} differs from layer to layer") from None
    if found is None and name == "num_attention_heads":
        raise UnsupportedModelError(f"{kind} has no attention heads, so it keeps no keys and values", DECODERS_ONLY)
    if not isinstance(found, int):
        raise UnsupportedModelError(f"{kind}: config.json should give {name} as one integer, found {found!r}")
    return found


def _normalized(config: PretrainedConfig) -> Any:
    """Return optimum's view of `config`. It looks up unchanged names for an architecture unknown to optimum."""
    try:
        return NormalizedConfigManager.get_normalized_config_class(config.model_type)(config)
    except KeyError:
        return NormalizedTextConfig(config)
