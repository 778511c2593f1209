"""Sizes are equal for every architecture's names of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint.model_config import DecoderShape, decoder_shape

SHAPE = DecoderShape(layers=3, heads=4, kv_heads=4, head_dim=12, hidden=48, vocabulary=97)
COMMON = dict(num_hidden_layers=3, num_attention_heads=4, hidden_size=48, vocab_size=97)
GPT = dict(n_layer=3, n_head=4, n_embd=48, vocab_size=97)
OTHERS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("llama", COMMON | dict(num_key_value_heads=2), dict(kv_heads=2)),
        ("qwen2", COMMON | dict(num_key_value_heads=1), dict(kv_heads=1)),
        ("qwen3", COMMON | dict(num_key_value_heads=2, head_dim=16), dict(kv_heads=2, head_dim=16)),
        ("gpt2", GPT, {}),
        ("gptj", GPT | dict(rotary_dim=4), {}),
        ("gpt_bigcode", GPT | dict(multi_query=True), dict(kv_heads=1)),
        ("gpt_neox", COMMON, {}),
        ("gpt_neo", dict(num_layers=3, num_heads=4, hidden_size=48, vocab_size=97,
                         attention_types=[[["global"], 3]]), {}),
        ("opt", COMMON | dict(ffn_dim=64, word_embed_proj_dim=48), {}),
        ("mpt", dict(n_layers=3, n_heads=4, d_model=48, vocab_size=97), {}),
        ("xglm", dict(num_layers=3, attention_heads=4, d_model=48, vocab_size=97, ffn_dim=64), {}),
        ("starcoder2", COMMON | dict(num_key_value_heads=2), dict(kv_heads=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_sizes_are_those_of_the_network(kind: str, values: dict, expected: dict) -> None:
    config = CONFIG_MAPPING[kind](**(OTHERS | values))
    shape = decoder_shape(config)
    assert shape == replace(SHAPE, **expected)
    network = AutoModelForCausalLM.from_config(config)
    output = network(network.dummy_inputs["input_ids"] % 97, use_cache=True)
    keys = [layer.keys for layer in output.past_key_values.layers]
    assert [key.shape[1::2] for key in keys] == [(shape.kv_heads, shape.head_dim)] * shape.layers
    assert network.get_input_embeddings().weight.shape == (shape.vocabulary, shape.hidden)


def test_of_a_multimodal_model_the_text_decoder_counts() -> None:
    text = COMMON | dict(num_key_value_heads=2, head_dim=16)
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    assert decoder_shape(config) == replace(SHAPE, kv_heads=2, head_dim=16)


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
