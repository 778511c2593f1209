"""Small random verifiers with a multi-token-prediction module inside, in the layouts of several projects.

Names and forms are those of the published checkpoints. Nothing here uses redraft's own table of layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Tensors = dict[str, torch.Tensor]
N, V, LAYERS = 48, 32, 2
SIZES = dict(
    vocab_size=V, hidden_size=N, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=96, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2)


@dataclass(frozen=True)
class Form:
    """A layout.

    architecture, sizes: of the verifier in transformers.   block: changes of its sizes that make the module's layer.
    names: stored names of embedding norm, hidden norm, projection and last norm, and the prefix of the layer's.
    config: changes of config.json.   copies: stored copies of embedding and head.
    """

    architecture: str
    sizes: dict[str, Any]
    names: Callable[[int], tuple[str, str, str, str, str]]
    block: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    copies: Callable[[int], tuple[str, ...]] = lambda layers: ()
    hidden_first: bool = False
    normed: bool = True


def _deepseek_names(layers: int) -> tuple[str, str, str, str, str]:
    at = f"model.layers.{layers}"
    return f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", f"{at}.shared_head.norm", f"{at}."


def _deepseek_copies(layers: int) -> tuple[str, ...]:
    return f"model.layers.{layers}.embed_tokens.weight", f"model.layers.{layers}.shared_head.head.weight"


def _mimo_names(layers: int) -> tuple[str, str, str, str, str]:
    at = "model.mtp_layers.0"
    return f"{at}.token_layernorm", f"{at}.hidden_layernorm", f"{at}.input_proj", f"{at}.final_layernorm", f"{at}."


def _qwen_names(layers: int) -> tuple[str, str, str, str, str]:
    return "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0."


FORMS = {
    "deepseek": Form(
        "deepseek_v3",
        SIZES | EXPERTS
        | dict(
            n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24,
            kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4, head_dim=8,
        ),
        _deepseek_names,
        dict(first_k_dense_replace=0),
        dict(num_nextn_predict_layers=1),
        _deepseek_copies,
    ),
    "glm": Form(
        "glm4_moe",
        SIZES | EXPERTS
        | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True),
        _deepseek_names,
        dict(first_k_dense_replace=0),
        dict(num_nextn_predict_layers=1),
        _deepseek_copies,
    ),
    "mimo": Form(
        "qwen2",
        SIZES,
        _mimo_names,
        config=dict(
            model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1,
            auto_map={
                "AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"
            },
        ),
        hidden_first=True,
        normed=False,
    ),
    "qwen": Form(
        "qwen3_next",
        SIZES | EXPERTS
        | dict(
            num_experts=4, shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["full_attention"] * LAYERS,
        ),
        _qwen_names,
        dict(layer_types=["full_attention"]),
    ),
}  # fmt: skip
"""Layouts by name. Qwen3-Next's verifier has full attention in all layers: redraft exports no linear attention."""


def write_native(folder: Path, name: str, layers: int = LAYERS, **changes: Any) -> Path:
    """Write a verifier of `layers` layers with its module. `changes` are of the architecture's configuration."""
    form = FORMS[name]
    sizes = form.sizes | changes
    torch.manual_seed(1)
    tensors = stored(form.architecture, sizes | {"num_hidden_layers": layers}, folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8")) | form.config
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    block = stored(form.architecture, sizes | form.block | {"num_hidden_layers": 1}, folder / "block")
    *parts, prefix = form.names(layers)
    start = "model.layers.0."
    tensors |= {f"{prefix}{key.removeprefix(start)}": t for key, t in block.items() if key.startswith(start)}
    for part, shape in zip(parts, ((N,), (N,), (N, 2 * N), (N,)), strict=True):
        tensors[f"{part}.weight"] = draw(shape, 0.0 if form.architecture == "qwen3_next" else 1.0)
    for copy, source in zip(form.copies(layers), ("model.embed_tokens.weight", "lm_head.weight"), strict=False):
        tensors[copy] = tensors[source].clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def stored(architecture: str, sizes: dict[str, Any], folder: Path) -> Tensors:
    """Write a random model of an architecture. Returns its tensors as they are stored."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return load_file(str(folder / "model.safetensors"))


def draw(shape: tuple[int, ...], center: float = 1.0) -> torch.Tensor:
    """Random numbers: a matrix, or a norm's gains around `center`."""
    return torch.randn(shape) * 0.3 + center if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
