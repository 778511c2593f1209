"""Small random checkpoints of every decoder that transformers can make.

A configuration starts from the defaults of its class. `SMALL` then replaces sizes by attribute name, also in nested
configurations. `EXCEPTIONS` at the end holds further values for single architectures.
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


def _small_values(values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: C901 - one branch for each kind of size
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


_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "output_gate_type": "sigmoid",
}  # fmt: skip
_TWO_KINDS = ["sliding_attention", "full_attention"]


def _sections(*sizes: int, **others: Any) -> dict[str, Any]:
    """Return a text model with a rotary embedding that splits a head among several axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sizes), **others}
    return {"text_config": {"rope_parameters": rope}}


_COMPASS = {
    "layer_types": _TWO_KINDS,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _TWO_KINDS},
}
_VQ = {"codebook_size": 16, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 128},
    "chameleon": {"vocabulary_map": {"<image>": 3}, "vq_config": _VQ},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "emu3": {
        "vocabulary_map": {"<image>": 3, "<|extra_200|>": 4, "<|visual token 000000|>": 5},
        "vq_config": _VQ,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": _TWO_KINDS * 2, "num_kv_shared_layers": 2, "intermediate_size": 80,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": 128,
    },
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "ernie4_5_vl_moe": _sections(3, 3, 2),
    "glm46v": _sections(2, 3, 3),
    "glm4v": _sections(2, 3, 3),
    "glm4v_moe": _sections(2, 1, 1, partial_rotary_factor=0.5),
    "glm_ocr": _sections(2, 3, 3),
    "glmga": _sections(2, 3, 3),
    "hunyuan_vl": _sections(1, 1, 1, 1),
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16, "layer_types": _TWO_KINDS},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl": _sections(2, 3, 3),
    "qwen2_5_omni_thinker": _sections(2, 3, 3),
    "qwen2_5_vl": _sections(2, 3, 3),
    "qwen2_vl": _sections(2, 3, 3),
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "xlm": {"causal": True},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 32, "n_mamba_heads": 4,
    },
}  # fmt: skip

NEEDED: Mapping[str, Mapping[str, Any]] = {"gemma4_assistant": {"text_config": _ASSISTANT}}
"""Arguments of classes that refuse their own defaults."""
