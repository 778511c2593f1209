"""Files that are damaged, of another kind or not a whole model are refused in one line that names cause and fix."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redraft.errors import CheckpointError, RedraftError
from redraft.export.checkpoint.sources import Source
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export.gguf_files import File, random_blocks, random_file

DAMAGED = "is truncated, or its header is damaged"


@pytest.fixture
def file() -> File:
    """A small Llama, which a test may change."""
    return random_file("llama")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small Llama."""
    return random_file("llama").write(tmp_path_factory.mktemp("valid") / "m.gguf").read_bytes()


def refusal(path: Path) -> str:
    """The line with which reading the file fails."""
    with pytest.raises(RedraftError) as caught:
        GgufCheckpoint.open(path).tensors  # noqa: B018
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def put(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def after(content: bytes, text: bytes) -> int:
    return content.index(text) + len(text)


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in counts": (lambda c: c[:20], "is truncated: it has 20 bytes"),
    "cut in metadata": (lambda c: c[: c.index(b"llama.block_count") + 5], DAMAGED),
    "cut in table": (lambda c: c[: c.index(b"blk.1.ffn_up.weight") + 25], DAMAGED),
    "cut in data": (lambda c: c[:-40], "is truncated: it should hold"),
    "another format": (lambda c: b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
    "empty": (lambda c: b"", "is not a GGUF file"),
    "version 1": (lambda c: put(c, 4, b"\1\0\0\0"), "is GGUF version 1"),
    "version 99": (lambda c: put(c, 4, b"\x63\0\0\0"), "is GGUF version 99"),
    "big-endian": (lambda c: put(c, 4, b"\0\0\0\3"), "is big-endian"),
    "too many tensors": (lambda c: put(c, 8, struct.pack("<Q", 20_000)), f"{DAMAGED}: it promises 20000 tensors"),
    "key twice": (
        lambda c: c.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"),
        "same metadata key twice",
    ),
    "unknown type": (
        lambda c: put(c, after(c, b"token_embd.weight") + 20, struct.pack("<I", 199)),
        "tensor token_embd.weight has the unknown type 199",
    ),
    "architecture": (lambda c: c.replace(b"llama", b"abcde"), "architecture abcde is not supported"),
}


@pytest.mark.parametrize("damage", BYTES)
def test_damaged_bytes_are_named(content: bytes, tmp_path: Path, damage: str) -> None:
    change, message = BYTES[damage]
    (tmp_path / "m.gguf").write_bytes(change(content))
    assert message in refusal(tmp_path / "m.gguf")


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    file = random_file("llama", hidden_size=256, head_dim=16)
    file.keys["embedding_length"] = 256
    file.types["blk.0.ffn_up.weight"] = "IQ2_XXS"
    file.packed["blk.0.ffn_up.weight"] = random_blocks("IQ2_XXS", file.tensors["blk.0.ffn_up.weight"].shape)
    line = refusal(file.write(tmp_path / "m.gguf"))
    assert "type IQ2_XXS of tensor blk.0.ffn_up.weight" in line
    assert "Q4_K_M, Q8_0 or F16" in line


def test_a_missing_head_is_the_embedding(file: File, tmp_path: Path) -> None:
    del file.tensors["output.weight"]
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensors


UNKNOWN = ("blk.0.attn_q.bias", "v.patch_embd.weight")
CONTENT: dict[str, tuple[Callable[[File], object], str]] = {
    **{
        name: (
            lambda f, name=name: f.tensors.update({name: np.zeros(64)}),  # type: ignore[misc]
            f"a llama model has no parameter for tensor {name}; give the model's Hugging Face folder",
        )
        for name in UNKNOWN
    },
    "missing tensor": (
        lambda f: f.tensors.pop("blk.1.attn_k.weight"),
        "no tensor for model.layers.1.self_attn.k_proj.weight",
    ),
    "layers": (lambda f: f.keys.update(block_count=1), "no parameter for tensor blk.1."),
    "shape": (
        lambda f: f.tensors.update({"blk.0.ffn_up.weight": np.zeros((97, 64))}),
        "tensor blk.0.ffn_up.weight is [97, 64], the metadata require [96, 64]",
    ),
    "clip": (lambda f: setattr(f, "architecture", "clip"), "a vision or audio encoder, not a language model"),
    "mmproj": (lambda f: f.tokenizer.update({"general.type": "mmproj"}), "a vision or audio encoder"),
    "adapter": (lambda f: f.tokenizer.update({"adapter.type": "lora"}), "a LoRA adapter"),
    "typed adapter": (lambda f: f.tokenizer.update({"general.type": "adapter"}), "a LoRA adapter"),
    "imatrix": (lambda f: f.tokenizer.update({"general.type": "imatrix"}), "an importance matrix"),
    "parts": (
        lambda f: f.tokenizer.update({"split.no": 1, "split.count": 2}),
        "is part 2 of 2; merge the parts first: llama-gguf-split --merge",
    ),
}


@pytest.mark.parametrize("fault", CONTENT)
def test_files_that_are_no_whole_model_are_refused(file: File, tmp_path: Path, fault: str) -> None:
    change, message = CONTENT[fault]
    change(file)
    assert message in refusal(file.write(tmp_path / "m.gguf"))


def test_one_expert_too_many(tmp_path: Path) -> None:
    file = random_file("qwen3moe")
    stored = file.tensors["blk.0.ffn_up_exps.weight"]
    file.tensors["blk.0.ffn_up_exps.weight"] = np.concatenate([stored, stored[:1]])
    message = "tensor blk.0.ffn_up_exps.weight is [32, 64], the metadata require none"
    assert message in refusal(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_numbers_that_are_not_finite(file: File, tmp_path: Path, kind: str) -> None:
    stored, name = "blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"
    file.types[stored] = kind
    if kind == "F32":
        file.tensors[stored][5, 7] = np.nan
    else:
        file.packed[stored] = random_blocks(kind, file.tensors[stored].shape)
        file.packed[stored][5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    checkpoint = GgufCheckpoint.open(file.write(tmp_path / "m.gguf"))
    assert not checkpoint.is_finite(checkpoint.tensors[name])
    with pytest.raises(CheckpointError, match=f"tensor {name} has a number that is not finite"):
        list(Source.of_names(checkpoint, {name: (96, 64)}).slabs(name))
