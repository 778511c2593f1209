"""Small random draft checkpoints with the files, keys and tensor names of each project that publishes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

N, V, H, LAYERS, HEADS, KV_HEADS, WIDTH = 48, 97, 23, 8, 4, 2, 40
Tensors = dict[str, torch.Tensor]


def draw(*shape: int) -> torch.Tensor:
    """Random numbers that bf16 represents, near 1 for norms."""
    numbers = torch.randn(*shape) * 0.4 if len(shape) == 1 else torch.randn(*shape) * 0.7 * shape[-1] ** -0.5
    return (numbers + (len(shape) == 1)).bfloat16().float()


def layer_tensors(prefix: str, inputs: int, head_dim: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * head_dim, inputs),
        "self_attn.k_proj": (KV_HEADS * head_dim, inputs),
        "self_attn.v_proj": (KV_HEADS * head_dim, inputs),
        "self_attn.o_proj": (N, HEADS * head_dim),
        "mlp.gate_proj": (WIDTH, N),
        "mlp.up_proj": (WIDTH, N),
        "mlp.down_proj": (N, WIDTH),
        "post_attention_layernorm": (N,),
    }
    return {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}


def sizes(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": N, "intermediate_size": WIDTH,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": V, "max_position_embeddings": 64, "tie_word_embeddings": False, **changes,
    }  # fmt: skip


def draft_map(tensors: Tensors) -> None:
    tokens = torch.randperm(V)[:H].sort().values
    tensors["d2t"] = tokens - torch.arange(H)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)


def eagle_one(bias: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """SafeAILab's EAGLE-1, EAGLE-2 and HASS."""
    tensors = {"fc.weight": draw(N, 2 * N), **layer_tensors("layers.0.", N, N // HEADS)}
    if bias:
        tensors["fc.bias"] = draw(N)
    return sizes(architectures=["LlamaForCausalLM"], bias=bias, **changes), tensors


def eagle_three(
    prefix: str = "midlayer.", small: bool = True, head: bool = True, architecture: str = "LlamaForCausalLM",
    **changes: Any,
) -> tuple[dict[str, Any], Tensors]:  # fmt: skip
    """SafeAILab's EAGLE-3, and SpecForge's with its architecture."""
    config = sizes(architectures=[architecture], head_dim=16, draft_vocab_size=H if small else V, **changes)
    tensors = {
        "fc.weight": draw(N, 3 * N),
        **layer_tensors(prefix, 2 * N, 16),
        f"{prefix}hidden_norm.weight": draw(N),
        f"{prefix}input_layernorm.weight": draw(N),
        "norm.weight": draw(N),
    }
    if head:
        tensors["lm_head.weight"] = draw(H if small else V, N)
    if small:
        draft_map(tensors)
    return config, tensors


def specforge(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    return eagle_three(architecture="LlamaForCausalLMEagle3", **changes)


def speculators_three(small: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    _, tensors = eagle_three("layers.0.", small)
    values = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": sizes(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
        "draft_vocab_size": H if small else V, "norm_before_residual": True, "norm_before_fc": False,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None, **changes,
    }  # fmt: skip
    return values, tensors


def speculators_one(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    tensors = {"fusion_fc.weight": draw(N, 2 * N), **layer_tensors("transformer.", N, N // HEADS)}
    values = {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "fusion_bias": False,
        "layernorms": False, "speculators_config": {"algorithm": "eagle"}, "transformer_layer_config": sizes(),
        **changes,
    }  # fmt: skip
    return values, tensors


def write(folder: Path, values: dict[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, str(folder / "model.safetensors"))
    return folder
