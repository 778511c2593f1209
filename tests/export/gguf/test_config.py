"""Metadata that change the model are applied, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from redraft.errors import RedraftError
from redraft.export.checkpoint.model_config import load_config
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export.gguf_files import HEAD_DIM, random_file

LLAMA3 = dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def read(path: Path, name: str, factors: np.ndarray | None = None, **keys: Any) -> PretrainedConfig:
    """The configuration of a small file with these additional keys; two underscores stand for a dot."""
    file = random_file(name)
    file.keys |= {key.replace("__", "."): value for key, value in keys.items()}
    if factors is not None:
        file.tensors["rope_freqs.weight"] = factors
    return load_config(GgufCheckpoint.open(file.write(path / "m.gguf")))


def frequencies(config: PretrainedConfig) -> torch.Tensor:
    """Rotary frequencies of a model of the configuration."""
    with torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq


def llama3_factors(theta: float = 5000.0) -> np.ndarray:
    """Frequency factors of llama.cpp's converter for `LLAMA3`."""
    found = []
    for frequency in theta ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        length = 2 * np.pi / frequency
        smooth = np.clip((8192 / length - 1.0) / (4.0 - 1.0), 0, 1)
        found.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(found)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", dict(expert_count=8)),
        ("llama", dict(attention__sliding_window=8)),
        ("llama", dict(logit_scale=2.0)),
        ("llama", dict(attention__causal=False)),
        ("llama", dict(attention__key_length=8)),
        ("llama", dict(attention__head_count_kv=[2, 1])),
        ("llama", dict(tensor_data_layout="other")),
        ("llama", dict(rope__scaling__type="linear", rope__scaling__factor=2.0, rope__scaling__attn_factor=1.2)),
        ("llama", dict(rope__scaling__type="yarn", rope__scaling__factor=2.0, rope__scaling__yarn_log_multiplier=0.1)),
        ("llama", dict(rope__scaling__type="longrope", rope__scaling__factor=2.0)),
        ("llama", dict(a_key_of_the_future=1)),
        ("qwen2", dict(rope__dimension_count=8)),
        ("qwen2", dict(attention__sliding_window=8)),
        ("qwen3moe", dict(expert_weights_scale=2.5)),
        ("gemma2", dict(attention__key_length=128, attention__value_length=128, rope__dimension_count=128)),
        ("gpt2", dict(attention__head_count_kv=2)),
    ],
)  # fmt: skip
def test_keys_that_transformers_does_not_follow_are_refused(name, keys, tmp_path):
    with pytest.raises(RedraftError) as caught:
        read(tmp_path, name, **keys)
    line = str(caught.value)
    assert any(
        word in line for key in keys for word in (key.replace("__", "."), "heads of 128", "longrope", "int", "rope.dim")
    ), line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", dict(expert_count=0, expert_used_count=0)),
        ("llama", dict(attention__sliding_window=64)),
        ("llama", dict(attention__causal=True, tensor_data_layout="Meta AI original pth")),
        ("llama", dict(attention__key_length=16, attention__value_length=16)),
        ("llama", dict(rope__scaling__type="none", rope__scaling__factor=1.0, rope__scaling__finetuned=False)),
        ("qwen3moe", dict(expert_weights_scale=1.0)),
    ],
)
def test_keys_that_change_nothing_are_accepted(name, keys, tmp_path):
    assert read(tmp_path, name, **keys).to_dict() == read(tmp_path, name).to_dict()


def test_a_key_that_transformers_leaves_out_is_followed(tmp_path):
    """`test_tensors_and_configuration_are_the_written_models` compares models with others."""
    assert read(tmp_path, "qwen2moe", expert_weights_norm=True).norm_topk_prob


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        (dict(type="linear", factor=4.0), dict(rope_type="linear", factor=4.0)),
        (dict(type="yarn", factor=4.0, original_context_length=16),
         dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    ],
)  # fmt: skip
def test_rope_scaling_is_that_of_the_original_configuration(keys, scaling, tmp_path):
    found = read(tmp_path, "qwen2", **{f"rope__scaling__{key}": value for key, value in keys.items()})
    plain = read(tmp_path, "qwen2")
    expected = CONFIG_MAPPING["qwen2"].from_dict(
        {**plain.to_dict(), "rope_parameters": {**scaling, "rope_theta": 5000.0}}
    )
    torch.testing.assert_close(frequencies(found), frequencies(expected), rtol=0, atol=0)
    assert not torch.equal(frequencies(found), frequencies(plain))


def test_gemma3_scales_its_full_attention_only(tmp_path):
    found = read(tmp_path, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base_swa=300.0)
    assert found.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert found.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 300.0}


def test_frequency_factors_are_llama3_scaling(tmp_path):
    found = read(tmp_path, "llama", llama3_factors())
    expected = CONFIG_MAPPING["llama"].from_dict(
        {**read(tmp_path, "llama").to_dict(), "rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}
    )
    torch.testing.assert_close(frequencies(found), frequencies(expected), rtol=0, atol=0)
    assert "rope_freqs.weight" not in GgufCheckpoint.open(tmp_path / "m.gguf").tensors


def test_factors_of_one_change_nothing(tmp_path):
    plain = read(tmp_path, "llama").to_dict()
    assert read(tmp_path, "llama", np.ones(HEAD_DIM // 2)).to_dict() == plain


@pytest.mark.parametrize("factors", [np.full(HEAD_DIM // 2, 2.0), np.full(4, 32.0), llama3_factors() * 1.001])
def test_other_factors_are_refused(factors, tmp_path):
    with pytest.raises(RedraftError, match=r"rope_freqs\.weight holds frequency factors other than"):
        read(tmp_path, "llama", factors)


def test_without_a_needed_key(tmp_path):
    file = random_file("llama")
    del file.keys["embedding_length"]
    with pytest.raises(RedraftError, match=r"m\.gguf"):
        GgufCheckpoint.open(file.write(tmp_path / "m.gguf")).tensors  # noqa: B018
