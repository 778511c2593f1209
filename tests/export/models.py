"""Small random checkpoints of the architectures under test, written as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": dict(rope_parameters=LLAMA3_ROPE),
    "mistral": dict(sliding_window=8, num_key_value_heads=1),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(num_key_value_heads=4),
    "gemma2": dict(
        num_hidden_layers=4,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


def config_of(architecture: str, **changes: Any) -> PretrainedConfig:
    """A small configuration of the architecture."""
    return CONFIG_MAPPING[architecture](**(COMMON | ARCHITECTURES.get(architecture, {}) | changes))


def write_checkpoint(folder: Path, architecture: str, shard_size: str = "5GB", **changes: Any) -> Path:
    """Write a random checkpoint with activations of ordinary size. Returns its directory."""
    torch.manual_seed(0)
    dtype = changes.pop("dtype", torch.float32)
    model = AutoModelForCausalLM.from_config(config_of(architecture, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 2.0 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder
