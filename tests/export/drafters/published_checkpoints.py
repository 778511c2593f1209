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


def block_tensors(layers: int, states: int, biases: bool = False) -> Tensors:
    """Tensors of z-lab's and DeepSpec's drafters, which are layers of Qwen3."""
    tensors = {"fc.weight": draw(N, states * N), "hidden_norm.weight": draw(N), "norm.weight": draw(N)}
    for number in range(layers):
        prefix = f"layers.{number}."
        tensors |= {**layer_tensors(prefix, N, 16), f"{prefix}input_layernorm.weight": draw(N)}
        tensors |= {f"{prefix}self_attn.{one}_norm.weight": draw(16) for one in "qk"}
        if biases:
            tensors |= {f"{prefix}self_attn.q_proj.bias": draw(HEADS * 16)}
            tensors |= {f"{prefix}self_attn.{one}_proj.bias": draw(KV_HEADS * 16) for one in "kv"}
    return tensors


def z_lab(
    ids: tuple[int, ...] | None = (1, 3, 7), biases: bool = False, **nested: Any
) -> tuple[dict[str, Any], Tensors]:
    """DFlash of z-lab, and JetSpec, whose head is causal."""
    own: dict[str, Any] = {"mask_token_id": 5, **nested}
    if ids:
        own["target_layer_ids"] = list(ids)
    values = sizes(
        model_type="qwen3", architectures=["DFlashDraftModel"], head_dim=16, num_hidden_layers=2, block_size=6,
        num_target_layers=LAYERS, dflash_config=own, rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        attention_bias=False,
    )  # fmt: skip
    return values, block_tensors(2, len(ids or (1, 4)), biases)


def deepspec(rank: int = 6, with_markov: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """DSpark of DeepSpec, without its copies of the verifier's embedding and head."""
    values, tensors = z_lab()
    del values["dflash_config"]
    values |= {
        "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 3, 7], "mask_token_id": 5, "num_anchors": 4,
        "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": with_markov, **changes,
    }  # fmt: skip
    if rank:
        tensors |= {f"markov_head.markov_w{i}.weight": draw(V, rank) for i in (1, 2)}
    read = N + rank if with_markov else N
    tensors |= {"confidence_head.proj.weight": draw(1, read), "confidence_head.proj.bias": draw(1)}
    return values, tensors


def speculators_block(kind: str = "dflash", small: bool = True, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """DFlash and DSpark of speculators, without their copies of the verifier's embedding and head."""
    layers = z_lab()[0]
    for other in ("architectures", "block_size", "num_target_layers", "dflash_config"):
        del layers[other]
    values = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": kind, "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind}, "transformer_layer_config": layers, "mask_token_id": 5,
        "draft_vocab_size": H if small else V, "block_size": 6, "aux_hidden_state_layer_ids": [2, 4, 8],
        "target_hidden_size": None, "sample_from_anchor": kind == "dspark", **changes,
    }  # fmt: skip
    tensors = block_tensors(2, 3)
    if rank := values.get("markov_rank", 0):
        tensors |= {"markov_head.markov_w1.weight": draw(V, rank), "markov_head.markov_w2.weight": draw(H, rank)}
    if kind == "dspark" and values.get("enable_confidence_head", True):
        tensors |= {"confidence_head.proj.weight": draw(1, N + rank), "confidence_head.proj.bias": draw(1)}
    if small:
        draft_map(tensors)
    return values, tensors
