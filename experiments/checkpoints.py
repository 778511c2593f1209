"""Small random checkpoints of every decoder that transformers can make.

A configuration starts from the defaults of its class. `SMALL` then replaces sizes by attribute name, also in nested
configurations. `EXCEPTIONS` holds further values for single architectures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from experiments.exceptions import EXCEPTIONS, NEEDED

FEWEST_LAYERS, MOST_LAYERS = 2, 4
VOCABULARY = 128
FIRST_WORD = 32
"""Special tokens have ids below this one. Prompts use ids from here on."""

_NAMES: Mapping[Any, str] = {
    VOCABULARY: "vocab_size decoder_vocab_size vocab_size_per_layer_input "
    "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions context_length",
    64: "hidden_size d_model n_embd emb_dim dim embedding_dim word_embed_proj_dim embedding_size "
    "input_embedding_size output_embedding_size attention_hidden_size lru_width out_hidden_size text_hidden_size "
    "projection_dim embed_dim hidden_size_global adapter_input_size adapter_in_dim adapter_out_dim",
    80: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim n_inner d_inner ffn_hidden_size "
    "feed_forward_size dim_ff dense_intermediate_size mlp_dim shared_intermediate_size intermediate_size_mlp",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_decoder_attention_heads "
    "attention_heads encoder_attention_heads num_encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads index_n_heads indexer_n_heads "
    "num_query_groups",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts "
    "linear_num_key_heads depth",
    1: "first_k_dense_replace num_dense_layers n_group topk_group num_expert_group n_shared_experts "
    "num_shared_experts moe_num_shared_experts",
    16: "head_dim kv_channels d_kv attention_head_size d_head linear_key_head_dim linear_value_head_dim "
    "linear_head_dim v_head_dim index_head_dim mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size "
    "kv_lora_rank global_head_dim swa_head_dim",
    24: "q_lora_rank",
    8: "sliding_window attention_chunk_size qk_rope_head_dim qk_nope_head_dim rotary_dim window_size local_attention "
    "sliding_window_size attention_window_size hidden_size_per_layer_input index_topk",
    48: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size",
    32: "image_size",
}
SMALL: Mapping[str, Any] = {name: value for value, names in _NAMES.items() for name in names.split()}
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "encoder_layers",
    "num_encoder_layers", "num_blocks", "layers",
)  # fmt: skip
SPECIAL_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def architectures() -> tuple[str, ...]:
    """Return model types with a causal language model, then those that read images too. Sorted within both."""
    text = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return *text, *sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(text))


def small_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a small configuration. Overrides win; a mapping for a nested configuration is merged into it.

    Raises any error of the class if it cannot be made.
    """
    values = _shrunk(model_type)
    for changes in (NEEDED.get(model_type, {}), EXCEPTIONS.get(model_type, {}), overrides):
        values = _merge(values, changes)
    return CONFIG_MAPPING[model_type](**values)


def write_checkpoint(folder: Path, model_type: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint in safetensors. Returns its folder.

    Every parameter and every persistent floating-point buffer differs from its initial value.
    """
    torch.manual_seed(seed)
    config = small_config(model_type, **overrides)
    images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    model = getattr(transformers, images)(config) if images else AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> torch.nn.Module:
    """Return transformers' own model of a checkpoint, eager and in float32."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, name).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Add noise to all parameters and to floating-point buffers that the checkpoint stores."""
    for parameter in model.parameters():
        scale = 0.3 if parameter.dim() < 2 else 2.0 * parameter.shape[-1] ** -0.5
        parameter.add_(torch.randn_like(parameter) * scale)
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            noise = torch.randn_like(buffer) * 0.3
            buffer.add_(noise if not buffer.any() else buffer * noise.abs())  # zeros among others have a meaning


def _shrunk(model_type: str) -> dict[str, Any]:
    """Return small values for the arguments of a configuration class, nested configurations included."""
    defaults = CONFIG_MAPPING[model_type]
    return _small_values(defaults(**NEEDED.get(model_type, {})).to_dict())


def _small_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return small values for the entries of a configuration with known names."""
    depth = next((values[name] for name in DEPTHS if name in values), None)
    lists = {name: _distinct(v) for name, v in values.items() if isinstance(v, list) and v and len(v) == depth}
    by_layer = {name: v for name, v in lists.items() if len(v) <= MOST_LAYERS}
    layers = max(FEWEST_LAYERS, *map(len, by_layer.values()), 0)
    tokens = iter(range(3, FIRST_WORD))
    small: dict[str, Any] = {name: list(islice(cycle(v), layers)) for name, v in by_layer.items()}
    for name, value in values.items():
        if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            small[name] = _small_values(value) | _kind(value)
        elif name == "rope_parameters" and "mrope_section" in str(value):
            small[name] = _with_sections(value, values.get("partial_rotary_factor"))
        elif name in DEPTHS:
            small[name] = layers
        elif name in SPECIAL_TOKENS:
            small[name] = SPECIAL_TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            small[name] = next(tokens)
        elif name == "is_decoder":
            small[name] = True
        elif name == "head_dim" and value == values.get("qk_rope_head_dim"):
            small[name] = SMALL["qk_rope_head_dim"]
        elif name == "num_key_value_heads" and values.get("kv_lora_rank"):
            small[name] = SMALL["num_attention_heads"]
        elif name in SMALL and value and isinstance(value, int | float) and not isinstance(value, bool):
            small[name] = min(value, SMALL[name])
    return small


def _kind(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": values["model_type"]} if "model_type" in values else {}


def _with_sections(rope: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    """Return rotary parameters with sections of several axes that fit the small head size."""
    if "mrope_section" not in rope:
        return {name: _with_sections(v, share) if isinstance(v, dict) else v for name, v in rope.items()}
    pairs = int(SMALL["head_dim"] * (rope.get("partial_rotary_factor") or share or 1.0)) // 2
    _, *others = (pairs * part // sum(rope["mrope_section"]) or 1 for part in rope["mrope_section"])
    return {**rope, "mrope_section": [pairs - sum(others), *others] if pairs > len(others) else [1, 1, 0][: pairs + 1]}


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Return each different value, in the order of first appearance."""
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `second` over `first`; mappings of sizes are merged, all other values are replaced."""
    merged = dict(first)
    for name, value in second.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict) and name.endswith(("_config", "coder"))
        merged[name] = _merge(merged[name], value) if nested else value
    return merged
