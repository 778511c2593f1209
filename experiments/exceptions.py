"""Values that single architectures need so that a small model of them can be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
