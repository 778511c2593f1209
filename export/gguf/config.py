"""A GGUF file's metadata as a transformers configuration. Keys that change the model are applied or refused.

transformers maps most keys and silently ignores the others. This module therefore compares every key of the
architecture with the resulting configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, last_line
from redraft.export.gguf.file import AS_FOLDER, Header, StoredArray

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of frequency factors, GGUF's form of the rotary scaling of Llama 3.1 and newer."""
FIELDS = {
    "context_length": ("max_position_embeddings",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Configuration fields of keys that transformers leaves out for some architecture; the first existing field counts."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.attn_factor": (1.0,),
}
"""Values with which a key changes nothing. The layout is the order of query rows that transformers expects."""
HARMLESS = ("rope.scaling.finetuned",)
ROPE_SCALING = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of every published model with frequency factors. They are used only if they give the file's factors."""
FACTOR_ERROR = 1e-4
TOKENS = "tokenizer.ggml.tokens"
POSITIVE = ("block_count", "embedding_length", "context_length", "attention.head_count", "vocab_size")
SIZES = (*POSITIVE, "attention.head_count_kv", "feed_forward_length", "attention.key_length", "attention.value_length",
         "attention.sliding_window", "rope.dimension_count", "expert_count", "expert_used_count",
         "expert_feed_forward_length", "expert_shared_feed_forward_length")  # fmt: skip
"""Keys that hold a whole number, or one for each layer."""
LARGEST_SIZE = (1 << 31) - 1
NUMBERS = ("epsilon", "freq_base", "freq_base_swa", "softcapping", "factor", "expert_weights_scale")
"""Last words of keys that hold a finite number."""


def read_config(header: Header, factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """The values of a config.json. `factors` is the tensor of frequency factors, if the file has one.

    Raises UnsupportedModelError naming a key that the configuration cannot hold, CheckpointError for an invalid one and
    for a file without tokens.
    """
    stated = _stated(header)
    _check_values(header, stated)
    if TOKENS not in header.metadata and "vocab_size" not in stated:
        raise CheckpointError(f"{header.path} has no tokenizer", AS_FOLDER)
    values = _mapped(header)
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(f"{header.path} is not a language model that transformers has ({kind})", AS_FOLDER)
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    default = CONFIG_MAPPING[kind]()
    for key, value in stated.items():
        if field := _field(key, kind, default):
            values[default.attribute_map.get(field, field)] = value
    scaled = factors is not None and bool((factors != 1).any())
    values |= _rope(stated, default, values, factors if scaled else None)
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # configurations raise many types
        raise CheckpointError(f"{header.path} has invalid metadata ({last_line(error)})", DOWNLOAD_AGAIN) from error
    for key, value in stated.items():
        if value != _found(config, key) and not _changes_nothing(key, value, stated):
            raise UnsupportedModelError(
                f"{header.path}: {header.architecture}.{key} is {value!r}, not supported by transformers' {kind}",
                AS_FOLDER,
            )
    _check_scale(header, config)
    if scaled and factors is not None:
        _check_factors(header, config, factors)
    return values


@contextmanager
def header_for_transformers(header: Header) -> Iterator[None]:
    """Within the context, transformers uses this header. Reading the file again would take seconds.

    Of the arrays, it gets the tokens and those of the architecture.
    """
    read = {key: value for key, value in header.metadata.items() if not isinstance(value, StoredArray)}
    read |= {f"{header.architecture}.{key}": value for key, value in _stated(header).items()}
    if TOKENS in header.metadata:
        read[TOKENS] = header.array(TOKENS)
    fields = {key: _reader_field(key, value) for key, value in read.items()}
    known = SimpleNamespace(fields=fields, tensors=header.tensors)
    with mock.patch.object(gguf, "GGUFReader", return_value=known):
        yield


def _reader_field(key: str, value: Any) -> gguf.ReaderField:
    values = value if isinstance(value, list) else [value]
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.INT64, float: gguf.GGUFValueType.FLOAT64}
    kind = kinds.get(type(values[0]), gguf.GGUFValueType.STRING) if values else gguf.GGUFValueType.INT64
    parts: list[Any] = [item.encode() if isinstance(item, str) else [item] for item in values]
    types = [gguf.GGUFValueType.ARRAY, kind] if isinstance(value, list) else [kind]
    return gguf.ReaderField(0, key, parts, list(range(len(parts))), types)


def _mapped(header: Header) -> dict[str, Any]:
    """Return the configuration that transformers reads."""
    try:
        with header_for_transformers(header):
            return dict(load_gguf_checkpoint(str(header.path))["config"])
    except ValueError as error:
        raise UnsupportedModelError(f"{header.path}: {last_line(error)}", AS_FOLDER) from error
    except CheckpointError:
        raise
    except Exception as error:  # transformers does not check what it reads
        raise CheckpointError(
            f"{header.path} has damaged metadata ({type(error).__name__}: {last_line(error)})", DOWNLOAD_AGAIN
        ) from error


def _stated(header: Header) -> dict[str, Any]:
    """Return the architecture's keys without its name. Arrays have at most a value for each tensor."""
    prefix = f"{header.architecture}."
    stated = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    for key, value in stated.items():
        if isinstance(value, StoredArray):
            if not 0 < len(value) <= len(header.tensors):
                raise _invalid(header, key, f"a list of {len(value)} values", "one for each layer")
            stated[key] = header.array(prefix + key)
    return stated


def _check_values(header: Header, stated: dict[str, Any]) -> None:
    """Refuse sizes that are none, and layers and experts that the file has no tensors for.

    A model is made of these sizes before its tensors are compared with the file's.
    """
    most_experts = max((tensor.shape[0] for tensor in header.tensors if len(tensor.shape) > 2), default=0)
    limits = {"block_count": len(header.tensors), "expert_count": most_experts}
    for key, value in stated.items():
        if key in SIZES:
            least, most = int(key in POSITIVE), limits.get(key, LARGEST_SIZE)
            listed = value if isinstance(value, list) else [value]
            if not all(type(item) is int and least <= item <= most for item in listed):
                raise _invalid(header, key, f"{value!r:.60}", f"a whole number from {least} to {most}")
        elif key.endswith(NUMBERS) and not (type(value) in (int, float) and math.isfinite(value)):
            raise _invalid(header, key, f"{value!r:.60}", "a number")


def _invalid(header: Header, key: str, value: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{header.path}: {header.architecture}.{key} is {value}, expected {expected}", DOWNLOAD_AGAIN
    )


def _field(key: str, kind: str, config: PretrainedConfig) -> str | None:
    """Return a key's field: that of transformers if the configuration has it, else that of redraft."""
    known: Any = GGUF_CONFIG_MAPPING
    mapping: dict[str, str | None] = known.get(kind.removesuffix("_text"), {})
    return next((name for name in (mapping.get(key), *FIELDS.get(key, ())) if name and hasattr(config, name)), None)


def _rope(
    stated: dict[str, Any], default: PretrainedConfig, values: dict[str, Any], factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Return fields of the rotary embedding that transformers leaves out."""
    fields: dict[str, Any] = {}
    if "rope.freq_base" in stated:
        fields["rope_theta"] = stated["rope.freq_base"]
    if "rope.freq_base_swa" in stated:
        fields["rope_local_base_freq"] = stated["rope.freq_base_swa"]
    if "rope.dimension_count" in stated and "partial_rotary_factor" in (
        getattr(default, "rope_parameters", None) or {}
    ):
        head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
        fields["partial_rotary_factor"] = stated["rope.dimension_count"] / head_dim
    if factors is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3_ROPE}
    elif stated.get("rope.scaling.type", "none") != "none":
        scaling = {name: stated.get(f"rope.scaling.{key}") for key, name in ROPE_SCALING.items()}
        fields["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
    return fields


def _found(config: PretrainedConfig, key: str) -> Any:
    """Return the configuration's value for a key, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    head_dim = _head_dim(config)
    derived = {
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": round(full.get("partial_rotary_factor", 1) * head_dim),
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": sliding.get("rope_theta"),
        "rope.scaling.type": str(full.get("rope_type")).replace("default", "none"),
        "rope.scaling.factor": full.get("factor"),
        "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
    }
    field = _field(key, config.model_type, config)
    return derived[key] if key in derived else getattr(config, field) if field else None


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _changes_nothing(key: str, value: Any, stated: dict[str, Any]) -> bool:
    """Return True if a model with this key is the same as without it."""
    if key == "attention.sliding_window":
        return isinstance(value, int) and value >= stated.get("context_length", math.inf)
    unscaled = key.startswith("rope.scaling.") and stated.get("rope.scaling.type", "none") == "none"
    return unscaled or key in HARMLESS or value in NEUTRAL.get(key, ())


def _check_scale(header: Header, config: PretrainedConfig) -> None:
    """Refuse a Gemma with another attention scale than 1/sqrt(head size): GGUF has no key for it."""
    scalar, head_dim = getattr(config, "query_pre_attn_scalar", None), _head_dim(config)
    if scalar is not None and scalar != head_dim:
        raise UnsupportedModelError(
            f"{header.path} has no attention scale for its heads of {head_dim}; {config.model_type} in "
            f"transformers uses 1/sqrt({scalar})",
            AS_FOLDER,
        )


def _check_factors(header: Header, config: PretrainedConfig, factors: NDArray[np.float32]) -> None:
    """Refuse frequency factors that differ from the configuration's rotary scaling."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")[0].numpy()
        plain = rope["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
        if factors.shape == scaled.shape and np.allclose(scaled * factors, plain, rtol=FACTOR_ERROR, atol=0):
            return
    raise UnsupportedModelError(
        f"{header.path}: tensor {ROPE_FACTORS} holds frequency factors other than those of Llama 3.1", AS_FOLDER
    )
