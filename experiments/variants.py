"""Options of architectures that change the computation, as overrides of their small configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Overrides = Mapping[str, Any]


def _rope(kind: str, theta: float = 500.0, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **others}}


_SHORT = {"original_max_position_embeddings": 32}
_LONG = {"original_max_position_embeddings": 128}
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i / 2 for i in range(8)]}
ROPES: Mapping[str, Overrides] = {
    "linear rope": _rope("linear", factor=4.0),
    "dynamic rope": _rope("dynamic", factor=4.0, **_SHORT),
    "yarn": _rope("yarn", factor=4.0, **_SHORT),
    "yarn, other factors": _rope("yarn", factor=4.0, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0, **_SHORT),
    "longrope": {**_rope("longrope", factor=4.0, **_FACTORS, **_SHORT), **_SHORT},
    "longrope, short": {**_rope("longrope", **_FACTORS, **_LONG), **_LONG},
    "llama3 rope": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_SHORT),
}  # fmt: skip
TIED: Mapping[str, Overrides] = {"tied head": {"tie_word_embeddings": True}}
UNTIED: Mapping[str, Overrides] = {"untied head": {"tie_word_embeddings": False}}
HEADS: Mapping[str, Overrides] = {
    "as many key heads": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
}
BIASES: Mapping[str, Overrides] = {"attention bias": {"attention_bias": True}}
NO_WINDOW: Mapping[str, Overrides] = {"no window": {"sliding_window": None}}
_SLIDING, _FULL = "sliding_attention", "full_attention"
ALL_FULL: Mapping[str, Overrides] = {"no layer slides": {"layer_types": [_FULL] * 2}}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
_NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

VARIANTS: Mapping[str, Mapping[str, Overrides]] = {
    "llama": {
        **ROPES, **TIED, **HEADS, **BIASES,
        "MLP bias": {"mlp_bias": True},
        "wide heads": {"head_dim": 32},
        "gelu": {"hidden_act": "gelu"},
    },
    "mistral": {**NO_WINDOW, **HEADS, "yarn": ROPES["yarn"], "wide heads": {"head_dim": 32}},
    "ministral": {"all slide": {"layer_types": [_SLIDING] * 2}, **ALL_FULL},
    "ministral3": {
        "yarn": _rope("yarn", factor=4.0, llama_4_scaling_beta=0.1, **_SHORT),
        "scaled late queries": _rope("default", llama_4_scaling_beta=0.3, original_max_position_embeddings=8),
    },
    "mixtral": {"window": {"sliding_window": 8}, "one expert": {"num_experts_per_tok": 1}},
    "qwen2": {
        **TIED, "yarn": ROPES["yarn"], "dynamic rope": ROPES["dynamic rope"],
        "window in later layers": {**_QWEN_WINDOW, "max_window_layers": 1, "layer_types": None},
    },
    "qwen3": {
        **TIED, **BIASES, **HEADS,
        "window": {**_QWEN_WINDOW, "layer_types": [_FULL, _SLIDING]},
    },
    "qwen2_moe": {
        "some dense layers": {"mlp_only_layers": [0]}, "no bias": {"qkv_bias": False},
        "normed weights": {"norm_topk_prob": True},
    },
    "qwen3_moe": {
        "some dense layers": {"mlp_only_layers": [0]}, "every other layer sparse": {"decoder_sparse_step": 2},
        "normed weights": {"norm_topk_prob": True}, **BIASES,
    },
    "gemma": {**HEADS, **UNTIED},
    "gemma2": {
        "soft caps that matter": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        "no soft caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "query scale": {"query_pre_attn_scalar": 24},
        **ALL_FULL, **BIASES, **UNTIED,
    },
    "gemma3_text": {
        "soft caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        "five of six slide": {"num_hidden_layers": 6, "layer_types": [*[_SLIDING] * 5, _FULL]},
        "linear rope": {"rope_parameters": {
            _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        }},
        "both directions": {"use_bidirectional_attention": True}, **BIASES,
    },
    "gemma3n_text": {"no shared caches": {"num_kv_shared_layers": 0}},
    "gemma4_text": {
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
        "keys are values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "shared caches": {"num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2},
        "no inputs per layer": {"hidden_size_per_layer_input": 0},
        "double wide MLP": {
            "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        "both directions": {"use_bidirectional_attention": "all"},
    },
    "falcon": {
        "ALiBi": {"alibi": True},
        "new architecture": _NEW_FALCON,
        "new architecture, one norm": {**_NEW_FALCON, "num_ln_in_parallel_attn": 1},
        "ALiBi, new architecture": {"alibi": True, **_NEW_FALCON},
        "as many key heads": {"multi_query": False, "num_kv_heads": 4},
        "sequential": {"parallel_attn": False},
        "bias": {"bias": True},
        "linear rope": ROPES["linear rope"],
    },
    "bloom": {"residual after norm": {"apply_residual_connection_post_layernorm": True}, **UNTIED},
    "mpt": {"clipped": {"attn_config": {"clip_qkv": 1.0}}, "eight heads": {"n_heads": 8}},
    "opt": {
        "norm after": {"do_layer_norm_before": False}, "narrow embedding": {"word_embed_proj_dim": 32},
        "no bias": {"enable_bias": False}, "gelu": {"activation_function": "gelu"},
        "plain norms": {"layer_norm_elementwise_affine": False}, **UNTIED,
    },
    "gpt2": {
        "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True},
        "both": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        "unscaled": {"scale_attn_weights": False}, "relu": {"activation_function": "relu"}, **UNTIED,
    },
    "gpt_bigcode": {"as many key heads": {"multi_query": False}, "unscaled": {"scale_attn_weights": False}},
    "gpt_neo": {"no layer slides": {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2}},
    "gpt_neox": {
        "whole rotary": _rope("default", partial_rotary_factor=1.0),
        "sequential": {"use_parallel_residual": False}, "no bias": {"attention_bias": False}, **TIED,
        "linear rope": _rope("linear", factor=4.0, partial_rotary_factor=0.25),
    },
    "gptj": {"whole rotary": {"rotary_dim": 16}},
    "codegen": {"whole rotary": {"rotary_dim": 16}},
    "phi": {
        "query and key norm": {"qk_layernorm": True}, **HEADS,
        "whole rotary": _rope("default", partial_rotary_factor=1.0), "yarn": ROPES["yarn"],
    },
    "phi3": {
        "window": {"sliding_window": 8}, "part rotary": _rope("default", partial_rotary_factor=0.5),
        "longrope": {**ROPES["longrope"], "sliding_window": None}, "longrope, short": ROPES["longrope, short"],
    },
    "phimoe": {"longrope": {
        "rope_parameters": {
            **ROPES["longrope"]["rope_parameters"], "short_mscale": 1.1, "long_mscale": 1.2,
        }, **_SHORT,
    }, "window": {"sliding_window": 8}, "LM head bias": {"lm_head_bias": True}, **BIASES},
    "stablelm": {
        "query and key norm": {"qk_layernorm": True}, "parallel": {"use_parallel_residual": True},
        "bias": {"use_qkv_bias": True}, "whole rotary": _rope("default", partial_rotary_factor=1.0),
    },
    "persimmon": {"no query and key norm": {"qk_layernorm": False}},
    "cohere": {"query and key norm": {"use_qk_norm": True}, "logit scale": {"logit_scale": 0.5}, **BIASES, **UNTIED},
    "cohere2": {**ALL_FULL, "logit scale": {"logit_scale": 0.5}},
    "granite": {
        "multipliers": {
            "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        }, **TIED, **BIASES,
    },
    "granitemoe": {"multipliers": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.5, "logits_scaling": 2.0,
    }},
    "granitemoehybrid": {
        "attention alone": {"layer_types": [_FULL] * 2, "position_embedding_type": "rope"},
        "attention without positions": {"layer_types": [_FULL] * 2, "position_embedding_type": "nope"},
    },
    "olmo": {"clipped": {"clip_qkv": 0.5}, **TIED, **BIASES, **HEADS},
    "olmo2": {**BIASES, **HEADS},
    "olmo3": {**ALL_FULL},
    "olmoe": {"clipped": {"clip_qkv": 0.5}, "normed weights": {"norm_topk_prob": True}},
    "glm": {"no bias": {"attention_bias": False}, "whole rotary": _rope("default", partial_rotary_factor=1.0)},
    "glm4_moe": {"query and key norm": {"use_qk_norm": True}, "groups": {"n_group": 2, "topk_group": 1}, **BIASES},
    "deepseek_v2": {
        "plain queries": {"q_lora_rank": None}, "narrow values": {"v_head_dim": 8},
        "groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
        "yarn": _rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.7, **_SHORT),
    },
    "deepseek_v3": {
        "plain queries": {"q_lora_rank": None}, "narrow values": {"v_head_dim": 8},
        "groups": {"n_group": 2, "topk_group": 1}, "raw weights": {"norm_topk_prob": False},
        "yarn": _rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, **_SHORT),
        "halves rotated": {"rope_interleave": False}, **BIASES,
    },
    "gpt_oss": {**ALL_FULL, "default rope": _rope("default")},
    "llama4_text": {
        "no norms": {"use_qk_norm": False}, "scaled late queries": {"floor_scale": 4, "attn_scale": 0.3},
        "no chunks": {"layer_types": [_FULL] * 2},
        "dense": {"moe_layers": []},
    },
    "smollm3": {"every layer rotates": {"no_rope_layers": [1, 1]}, "no layer rotates": {"no_rope_layers": [0, 0]},
        "window": {**_QWEN_WINDOW, "layer_types": [_SLIDING, _FULL]}},
    "exaone4": {"all full": {"layer_types": [_FULL] * 2, "sliding_window": None}},
    "starcoder2": {"window": {"sliding_window": 8}, "no bias": {"use_bias": False}, **UNTIED},
    "nemotron": {"whole rotary": _rope("default", partial_rotary_factor=1.0), **BIASES, **TIED},
    "helium": {**BIASES, **TIED},
    "seed_oss": {"output bias": {"attention_out_bias": True}, "no bias": {"attention_bias": False}},
    "hunyuan_v1_dense": {**BIASES, "dynamic rope": _rope("dynamic", alpha=100.0, factor=1.0)},
    "biogpt": {"unscaled embedding": {"scale_embedding": False}},
    "xglm": {"unscaled embedding": {"scale_embedding": False}, "relu": {"activation_function": "relu"}},
    "bart": {"scaled embedding": {"scale_embedding": True}},
    "bert": {**UNTIED, "relu": {"hidden_act": "relu"}},
    "dbrx": {"as many key heads": {"attn_config": {"kv_n_heads": 4}}},
    "apertus": {**BIASES},
    "ernie4_5": {"bias": {"use_bias": True}, **UNTIED},
    "modernbert-decoder": {**ALL_FULL},
    "llava": {
        "Mistral": {"text_config": {"model_type": "mistral", "sliding_window": 8}},
        "Qwen2": {"text_config": {"model_type": "qwen2"}},
    },
}  # fmt: skip
