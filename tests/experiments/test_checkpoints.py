"""Small checkpoints: every stored number moved, small for any defaults, and the same for the same seed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from experiments.checkpoints import architectures, load_reference, small_config, write_checkpoint


def test_every_causal_model_of_transformers_is_listed():
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= set(architectures())
    assert {"llava", "mistral3", "qwen3_5"} <= set(architectures())


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3", "gemma4_text", "gpt2", "glm4_moe"])
def test_every_stored_number_moves(tmp_path, architecture):
    """A product that drops a norm's gain, a bias or a buffer must not go unnoticed."""
    stored = load_reference(write_checkpoint(tmp_path, architecture)).state_dict()
    fresh = AutoModelForCausalLM.from_config(small_config(architecture)).state_dict()
    assert stored.keys() == fresh.keys()
    floating = {name: value for name, value in stored.items() if value.is_floating_point()}
    still = [name for name, value in floating.items() if (value == fresh[name]).all()]
    assert not still
    assert sum(value.numel() for value in floating.values()) < 1e6


def test_layers_of_every_kind_are_kept():
    """Defaults have five sliding layers before the first full one."""
    config = small_config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 8


def test_overrides_reach_nested_configurations():
    config = small_config("llava", text_config={"num_key_value_heads": 1})
    assert (config.text_config.num_key_value_heads, config.text_config.hidden_size) == (1, 64)


def test_the_seed_decides(tmp_path):
    def weight(folder: str, seed: int) -> torch.Tensor:
        return load_reference(write_checkpoint(tmp_path / folder, "llama", seed)).state_dict()["lm_head.weight"]

    assert torch.equal(weight("a", 1), weight("b", 1))
    assert not torch.equal(weight("c", 1), weight("d", 2))
