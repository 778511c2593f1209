"""Refusals name their reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

from redraft.config import BuildConfig
from redraft.errors import CheckpointError, RedraftError, UnsupportedModelError, UsageError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.model_config import DecoderShape, decoder_shape
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.graph import attention
from redraft.export.graph.decoder import check_hidden_states
from tests.export.models import COMMON, export_verifier


def export_config(tmp_path: Path, values: dict, **config):
    """Export a configuration with random weights. Refusals come before any weight is read."""
    (tmp_path / "config.json").write_text(json.dumps(COMMON | values))
    checkpoint = Checkpoint(tmp_path, COMMON | values, {})
    return export_verifier(checkpoint, tmp_path, BuildConfig(random_weights=True, **config))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "nosuchmodel"}, "knows no architecture 'nosuchmodel'"),
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code from its own repository"),
        ({"model_type": "t5"}, "t5 is not a decoder-only"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
        ({"model_type": "phi3", "head_dim": 12, "original_max_position_embeddings": 64,
          "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
          "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 64}},
         "changes its rotary embedding in texts of more than 64 tokens; give --max-model-len 64 or less"),
        ({"model_type": "bart", "is_decoder": True, "is_encoder_decoder": False, "decoder_layers": 3},
         "bart counts token positions itself"),
        ({"model_type": "doge"}, "DogeAttention makes its own attention mask"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention", "full_attention"]},
         "layers without a plain KV cache .linear_attention"),
        ({"model_type": "bert", "is_decoder": False}, "BertSelfAttention attends in both directions"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_refused_by_name(tmp_path, values, reason):
    with pytest.raises((UnsupportedModelError, CheckpointError), match=reason) as caught:
        export_config(tmp_path, values)
    assert "\n" not in str(caught.value)
    assert_ends(caught.value)


def assert_ends(error):
    """The chain of an error's causes has no cycle."""
    seen = set()
    while error is not None:
        assert id(error) not in seen
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def test_window_that_a_layer_contradicts_is_noticed(tmp_path, monkeypatch):
    """A layer with another window than its mask's would be wrong past one of them."""
    honest = attention.attend

    def contradicting(*args, sliding_window=None, **kwargs):
        return honest(*args, sliding_window=5, **kwargs)

    AttentionInterface.register(attention.INTERFACE, contradicting)
    try:
        with pytest.raises(UnsupportedModelError, match="MistralAttention has a window of 5 and a mask of 8"):
            export_config(tmp_path, {"model_type": "mistral", "sliding_window": 8})
    finally:
        AttentionInterface.register(attention.INTERFACE, honest)


def test_context_past_the_limit(tmp_path):
    with pytest.raises(UsageError, match="context 500 passes the model's limit of 128"):
        export_config(tmp_path, {"model_type": "llama"}, max_model_len=500)


@pytest.mark.parametrize("hidden_state", ["3", "first", "-1", "01", "²"])
def test_unknown_hidden_state(hidden_state):
    with pytest.raises(UsageError, match="unknown hidden state"):
        check_hidden_states(("last", "2", hidden_state), 3)


def test_invalid_config_is_one_line(tmp_path):
    with pytest.raises(RedraftError) as caught:
        export_config(tmp_path, {"model_type": "llama", "hidden_size": "wide"})
    assert "\n" not in str(caught.value)


SHAPE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "rope_theta": 5e5}


def check_shape(found: dict, expected: dict) -> None:
    """Compare a checkpoint's configuration with a recipe's shape."""
    model_config.check_shape(model_config.load_config(Checkpoint(Path("x"), found, {})), expected, "mine")


def test_a_checkpoint_of_a_recipes_shape_in_any_spelling():
    """Newer files nest rotary fields. The context length does not matter."""
    nested = {"rope_type": "default", "rope_theta": 5e5}
    values = {k: v for k, v in SHAPE.items() if k != "rope_theta"} | {"rope_parameters": nested}
    check_shape(values | {"max_position_embeddings": 99}, SHAPE | {"max_position_embeddings": 4096})


def test_a_gguf_files_numbers_fit_a_recipes_shape():
    """GGUF files store fp32; 1e-5 in fp32 is another number."""
    exact = {"rms_norm_eps": 1e-5, "rope_theta": 12345.6}
    check_shape(SHAPE | {name: float(np.float32(value)) for name, value in exact.items()}, SHAPE | exact)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 96}, "hidden_size is 96, expected 64"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, expected 2"),
        ({"rope_theta": 1e4}, "rope_parameters is "),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', expected 'llama'"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_the_field(change, field):
    with pytest.raises(CheckpointError, match=f"does not fit recipe mine: {field}"):
        check_shape(SHAPE | change, SHAPE)


def test_a_recipes_unknown_architecture_is_named():
    with pytest.raises(UnsupportedModelError, match=r"knows no architecture .nosuch.; fix \[shape\] of recipe mine"):
        check_shape(SHAPE, {"model_type": "nosuch"})


SIZES = DecoderShape(layers=3, heads=4, kv_heads=4, head_dim=12, hidden=48, vocabulary=97)
SMALL = dict(num_hidden_layers=3, num_attention_heads=4, hidden_size=48, vocab_size=97)
GPT = dict(n_layer=3, n_head=4, n_embd=48, vocab_size=97)
OTHERS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("llama", SMALL | dict(num_key_value_heads=2), dict(kv_heads=2)),
        ("qwen3", SMALL | dict(num_key_value_heads=2, head_dim=16), dict(kv_heads=2, head_dim=16)),
        ("gpt2", GPT, {}),
        ("gpt_bigcode", GPT | dict(multi_query=True), dict(kv_heads=1)),
        ("gpt_neo", dict(num_layers=3, num_heads=4, hidden_size=48, vocab_size=97,
                         attention_types=[[["global"], 3]]), {}),
        ("opt", SMALL | dict(ffn_dim=64, word_embed_proj_dim=48), {}),
        ("mpt", dict(n_layers=3, n_heads=4, d_model=48, vocab_size=97), {}),
        ("xglm", dict(num_layers=3, attention_heads=4, d_model=48, vocab_size=97, ffn_dim=64), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_sizes_are_those_of_the_network(kind: str, values: dict, expected: dict) -> None:
    config = CONFIG_MAPPING[kind](**(OTHERS | values))
    shape = decoder_shape(config)
    assert shape == replace(SIZES, **expected)
    network = AutoModelForCausalLM.from_config(config)
    output = network(network.dummy_inputs["input_ids"] % 97, use_cache=True)
    keys = [layer.keys for layer in output.past_key_values.layers]
    assert [key.shape[1::2] for key in keys] == [(shape.kv_heads, shape.head_dim)] * shape.layers
    assert network.get_input_embeddings().weight.shape == (shape.vocabulary, shape.hidden)


def test_of_a_multimodal_model_the_text_decoder_counts() -> None:
    text = SMALL | dict(num_key_value_heads=2, head_dim=16)
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    assert decoder_shape(config) == replace(SIZES, kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", "mamba has no attention heads, so it keeps no keys and values"),
        ("gemma4_text", "gemma4_text: head_dim differs from layer to layer"),
    ],
)
def test_models_without_such_a_shape_are_refused(kind: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_shape(CONFIG_MAPPING[kind]())
