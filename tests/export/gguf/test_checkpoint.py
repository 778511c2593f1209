"""GGUF files give the written model's tensors, configuration, tokenizer and results."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from redraft.assembly import tokenizers
from redraft.export.gguf.checkpoint import CONVERTED, GgufCheckpoint
from redraft.export.gguf.file import PLAIN_TYPES, TYPES
from redraft.export.gguf.tokenizer import unknown_split
from redraft.export.reference import reference_logits
from tests.export.gguf_files import ARCHITECTURES, TEMPLATE, by_transformers, random_blocks, random_file

Q4_0 = gguf.GGMLQuantizationType.Q4_0
TEXTS = ["the cat 12 an a", "  two  spaces\n\n12 345", "the<s>the", "é ünï 漢字 \x07"]


def whole(checkpoint: GgufCheckpoint, name: str) -> np.ndarray:
    return np.concatenate(list(checkpoint.slabs(checkpoint.tensors[name])))


def saved(model: torch.nn.Module, folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_and_configuration_are_the_written_models(name, tmp_path):
    file = random_file(name)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    expected = saved(file.model, tmp_path / "saved")
    assert set(checkpoint.tensors) == set(expected)
    for key, values in expected.items():
        assert checkpoint.tensors[key].shape == values.shape
        np.testing.assert_allclose(whole(checkpoint, key), values, rtol=0, atol=2e-7)
    config = CONFIG_MAPPING[checkpoint.config["model_type"]].from_dict(dict(checkpoint.config))
    loaded = AutoModelForCausalLM.from_config(config).eval()
    loaded.load_state_dict(file.model.state_dict())
    tokens = torch.arange(5, 37)[None]
    torch.testing.assert_close(loaded(tokens).logits, file.model(tokens).logits)


def test_every_type_gives_transformers_numbers(tmp_path, monkeypatch):
    """Any bytes, a row at a time. Query and key rows come in transformers' order."""
    monkeypatch.setattr("redraft.export.checkpoint.base.SLAB_BYTES", 1)
    file = random_file("llama", hidden_size=256, head_dim=16, intermediate_size=256)
    file.keys |= {"embedding_length": 256, "feed_forward_length": 256}
    matrices = [name for name, values in sorted(file.tensors.items()) if "blk." in name and values.shape[1:] == (256,)]
    file.types = dict(zip(matrices, cycle(TYPES), strict=False))
    file.packed = {
        name: random_blocks(kind, file.tensors[name].shape)
        for name, kind in file.types.items()
        if kind not in PLAIN_TYPES
    }
    path = file.write(tmp_path / "m.gguf")
    checkpoint = GgufCheckpoint.open(path)
    expected = by_transformers(path).state_dict()
    for name, entry in checkpoint.tensors.items():
        slabs = list(checkpoint.slabs(entry))
        assert len(slabs) == (len(entry.shape) < 2 or entry.shape[0])
        np.testing.assert_array_equal(np.concatenate(slabs), expected[name].numpy())
    assert {entry.dtype.removeprefix(CONVERTED) for entry in checkpoint.tensors.values()} == {*TYPES}


def test_a_quantized_turned_matrix_is_transformers_tensor(tmp_path):
    file = random_file("gpt2", "Q4_0", max_position_embeddings=1024)  # transformers has no other tokenizer for GPT-2
    path = file.write(tmp_path / "m.gguf")
    checkpoint, expected = GgufCheckpoint.open(path), by_transformers(path).state_dict()
    for key in checkpoint.tensors:
        np.testing.assert_array_equal(whole(checkpoint, key), expected[key].numpy())


def test_quantized_experts_are_slices_of_the_stored_tensor(tmp_path):
    file = random_file("qwen3moe", "Q4_0")
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    for part in ("gate", "up", "down"):
        stored = file.tensors[f"blk.1.ffn_{part}_exps.weight"]
        for expert in range(4):
            packed = gguf.quants.quantize(np.ascontiguousarray(stored[expert]), Q4_0)
            found = whole(checkpoint, f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight")
            np.testing.assert_array_equal(found, gguf.quants.dequantize(packed, Q4_0))


def test_only_numbers_in_their_own_order_are_used_in_place(tmp_path):
    half = GgufCheckpoint.open(random_file("qwen2", "F16").write(tmp_path / "half.gguf"))
    assert {entry.dtype for entry in half.tensors.values()} == {"F16", "F32"}
    llama = GgufCheckpoint.open(random_file("llama").write(tmp_path / "llama.gguf"))
    found = {name.split(".")[-2]: entry.dtype for name, entry in llama.tensors.items()}
    assert (found["v_proj"], found["q_proj"]) == ("F32", "GGUF F32")
    entry = llama.tensors["model.layers.0.self_attn.v_proj.weight"]
    stored = np.fromfile(llama.file, np.float32, entry.length // 4, offset=entry.offset).reshape(entry.shape)
    np.testing.assert_array_equal(stored, whole(llama, entry.name))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3"])
def test_text_files_are_transformers_tokenizer(name, tmp_path):
    path = random_file(name).write(tmp_path / "m.gguf")
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    out = tmp_path / "out"
    out.mkdir()
    GgufCheckpoint.open(path).write_text_files(out)
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in TEXTS:
        assert found.encode(text).ids == expected(text)["input_ids"]
    assert len(found.encode(TEXTS[0]).ids) < len(TEXTS[0])
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    ends = [2, 3] if name == "qwen2" else [2]
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": ends}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_digits_are_words_of_their_own_if_the_file_says_so(name, tmp_path):
    """The split must survive loading: transformers gives Qwen2's tokenizers their own."""
    file = random_file(name)
    file.tokenizer = random_file("qwen2").tokenizer | {"tokenizer.ggml.pre": "smollm"}
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    source.mkdir()
    bundle.mkdir()
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    checkpoint.write_text_files(source)
    special = tokenizers.write_text_files(source, bundle)
    split = Tokenizer.from_file(str(bundle / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a  12")
    assert [word.replace("Ġ", " ") for word, _ in split] == ["a", "  ", "1", "2"]
    assert (special.bos, special.eos) == (1, (2, 3))
    assert (bundle / "chat_template.jinja").read_text() == TEMPLATE
    assert unknown_split(checkpoint.header) == ()


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen2moe"])
def test_layers_one_by_one_are_the_whole_model(name: str, tmp_path: Path) -> None:
    file = random_file(name)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    tokens = [5, 9, 3, 11, 4, 7, 8, 6, 10, 3, 5, 12]
    (found,) = reference_logits(checkpoint, [tokens])
    with torch.no_grad():
        expected = file.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
