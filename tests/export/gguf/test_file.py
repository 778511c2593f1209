"""Files that are damaged, of another kind or not a whole model are refused in one line that names cause and fix."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from redraft.errors import CheckpointError, RedraftError
from redraft.export.checkpoint.sources import Source
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export.gguf_files import File, random_blocks, random_file


@pytest.fixture
def file() -> File:
    """A small Llama, which a test may change."""
    return random_file("llama")


def refusal(path: Path) -> str:
    """The line with which reading the file fails."""
    with pytest.raises(RedraftError) as caught:
        GgufCheckpoint.open(path).tensors  # noqa: B018
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("place", ["magic", "counts", "metadata", "strings", "table", "data"])
def test_cut_short(file, tmp_path, place):
    path = file.write(tmp_path / "m.gguf")
    content = path.read_bytes()
    at = {
        "magic": 3,
        "counts": 20,
        "metadata": content.index(b"llama.block_count") + 5,
        "strings": content.index(b"<0x41>"),
        "table": content.index(b"blk.1.ffn_up.weight") + 25,
        "data": len(content) - 40,
    }[place]
    os.truncate(path, at)
    assert ("truncated" in refusal(path)) or place == "magic"
    assert "download or copy" in refusal(path)


def test_no_gguf_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")


def test_empty_file(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("version", "found"), [(b"\1\0\0\0", "version 1"), (b"\0\0\0\3", "big-endian"), (b"\x63\0\0\0", "version 99")]
)
def test_other_versions(file, tmp_path, version, found):
    path = file.write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = version
    path.write_bytes(content)
    assert found in refusal(path)


@pytest.mark.parametrize(
    ("count", "promised"), [(10_000, ""), (20_000, ": it promises 20000 tensors"), (2**60, ": it")]
)
def test_counts_that_the_file_cannot_hold(file, tmp_path, count, promised):
    path = file.write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[8:16] = struct.pack("<Q", count)
    path.write_bytes(content)
    assert f"is truncated, or its header is damaged{promised}" in refusal(path)


def test_array_longer_than_the_file(file, tmp_path):
    path = file.write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    content[at : at + 8] = struct.pack("<Q", 2**58)
    path.write_bytes(content)
    assert "is truncated, or its header is damaged" in refusal(path)


def rename(path: Path, old: str, new: str, times: int = 1) -> None:
    """Replace a string of the file by one of the same length."""
    assert len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode(), times))


def test_a_tensor_twice(file, tmp_path):
    path = file.write(tmp_path / "m.gguf")
    rename(path, "blk.1.ffn_up.weight", "blk.0.ffn_up.weight")
    assert "has tensor blk.0.ffn_up.weight twice" in refusal(path)


def test_a_metadata_key_twice(file, tmp_path):
    path = file.write(tmp_path / "m.gguf")
    rename(path, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
    assert "same metadata key twice" in refusal(path)


def test_an_unknown_type(file, tmp_path):
    path = file.write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    content[at : at + 4] = struct.pack("<I", 199)
    path.write_bytes(content)
    assert "tensor token_embd.weight has the unknown type 199" in refusal(path)


def test_a_type_that_is_not_read(file, tmp_path):
    file = random_file("llama", hidden_size=256, head_dim=16)
    file.keys["embedding_length"] = 256
    file.types["blk.0.ffn_up.weight"] = "IQ2_XXS"
    file.packed["blk.0.ffn_up.weight"] = random_blocks("IQ2_XXS", file.tensors["blk.0.ffn_up.weight"].shape)
    line = refusal(file.write(tmp_path / "m.gguf"))
    assert "type IQ2_XXS of tensor blk.0.ffn_up.weight" in line
    assert "Q4_K_M, Q8_0 or F16" in line


def test_a_missing_tensor(file, tmp_path):
    del file.tensors["blk.1.attn_k.weight"]
    assert "no tensor for model.layers.1.self_attn.k_proj.weight" in refusal(file.write(tmp_path / "m.gguf"))


def test_a_missing_head_is_the_embedding(file, tmp_path):
    del file.tensors["output.weight"]
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.0.attn_sinks.weight", "rope_factors_long.weight", "v.patch_embd.weight"]
)
def test_a_tensor_that_the_model_has_no_place_for(file, tmp_path, name):
    file.tensors[name] = np.zeros(64)
    line = refusal(file.write(tmp_path / "m.gguf"))
    assert f"a llama model has no parameter for tensor {name}" in line
    assert "Hugging Face folder" in line


def test_more_layers_than_the_metadata_say(file, tmp_path):
    file.keys["block_count"] = 1
    assert "no parameter for tensor blk.1." in refusal(file.write(tmp_path / "m.gguf"))


def test_a_tensor_of_another_shape(file, tmp_path):
    file.tensors["blk.0.ffn_up.weight"] = np.zeros((97, 64))
    assert "tensor blk.0.ffn_up.weight is [97, 64], the metadata require [96, 64]" in refusal(
        file.write(tmp_path / "m.gguf")
    )


def test_one_expert_too_many(tmp_path):
    file = random_file("qwen3moe")
    stored = file.tensors["blk.0.ffn_up_exps.weight"]
    file.tensors["blk.0.ffn_up_exps.weight"] = np.concatenate([stored, stored[:1]])
    assert "tensor blk.0.ffn_up_exps.weight is [32, 64], the metadata require none" in refusal(
        file.write(tmp_path / "m.gguf")
    )


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_numbers_that_are_not_finite(file, tmp_path, kind):
    values = file.tensors["blk.1.ffn_gate.weight"].copy()
    values[5, 7] = np.nan if kind == "F32" else np.inf
    if kind != "F32":
        packed = random_blocks(kind, values.shape)
        packed[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
        file.packed["blk.1.ffn_gate.weight"] = packed
    file.types["blk.1.ffn_gate.weight"] = kind
    file.tensors["blk.1.ffn_gate.weight"] = values
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    name = "model.layers.1.mlp.gate_proj.weight"
    source = Source.of_names(checkpoint, {name: (96, 64)})
    assert not checkpoint.is_finite(checkpoint.tensors[name])
    with pytest.raises(CheckpointError, match=f"tensor {name} has a number that is not finite"):
        list(source.slabs(name))


def test_an_unknown_architecture(file, tmp_path):
    path = file.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"abcde"))
    assert "architecture abcde is not supported" in refusal(path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"general.type": "mmproj"}, "a vision or audio encoder"),
        ({"general.type": "adapter", "adapter.type": "lora"}, "a LoRA adapter"),
        ({"adapter.type": "lora"}, "a LoRA adapter"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"split.no": 1, "split.count": 2}, "is part 2 of 2; merge the parts first: llama-gguf-split --merge"),
    ],
)
def test_files_that_hold_no_whole_model(file, tmp_path, changes, found):
    file.tokenizer |= changes
    assert found in refusal(file.write(tmp_path / "m.gguf"))


def test_a_vision_encoder(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "a vision or audio encoder, not a language model" in refusal(tmp_path / "mmproj.gguf")
