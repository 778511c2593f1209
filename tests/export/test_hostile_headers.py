"""Headers of GGUF and safetensors files are untrusted: each is read or refused in one line, within the file's size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Protocol

import gguf
import pytest
from safetensors.numpy import save_file

from redraft.errors import CheckpointError, RedraftError
from redraft.export.checkpoint.safetensors import read_header
from redraft.export.gguf import file as gguf_file
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export import hostile
from tests.export.gguf_files import random_file

MOST_BYTES = 3 << 20
"""Memory beyond that of the file: of a name, a place and a shape for each of a few thousand tensors or keys."""


class Place(Protocol):
    """A tensor's bytes."""

    shape: tuple[int, ...]
    offset: int
    length: int


def gguf_places(path: Path) -> Iterable[Place]:
    return gguf_file.read_header(path).tensors


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_file("llama").write(tmp_path_factory.mktemp("gguf") / "valid.gguf")


def read(path: Path, data: bytes, reader: Callable[[Path], Iterable[Place]]) -> str:
    """Read hostile bytes, and return `read` or the type of the refusal. Fails for what a header must not do."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        tensors = list(reader(path))
        places = sorted((tensor.offset, tensor.length) for tensor in tensors)
    except RedraftError as error:
        return type(error).__name__ if len(str(error)) < 1000 else "a long line"
    else:
        assert all(0 <= offset <= offset + length <= len(data) for offset, length in places)
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(places))
        assert all(type(number) is int for tensor in tensors for number in (*tensor.shape, tensor.length))
        return "read"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * len(data) + MOST_BYTES


def test_hostile_gguf_headers(tmp_path: Path) -> None:
    random = Random(1)
    found = {read(tmp_path / "a.gguf", hostile.hostile_gguf(random), gguf_places) for _ in range(600)}
    assert found == {"read", "CheckpointError", "UnsupportedModelError"}


def test_damaged_gguf_headers(valid: Path, tmp_path: Path) -> None:
    random, data = Random(2), valid.read_bytes()
    header = min(tensor.offset for tensor in gguf_file.read_header(valid).tensors)
    found = {read(tmp_path / "a.gguf", hostile.damaged(data, header, random), gguf_places) for _ in range(400)}
    assert found >= {"read", "CheckpointError"}


def test_hostile_safetensors_headers(tmp_path: Path) -> None:
    random = Random(3)
    data = [hostile.hostile_safetensors(random) for _ in range(600)]
    assert {read(tmp_path / "a", item, read_header) for item in data} == {"read", "CheckpointError"}


def test_damaged_safetensors_headers(tmp_path: Path) -> None:
    import numpy as np

    tensors = {f"model.layers.{n}.weight": np.zeros((n, 3), np.float32) for n in range(9)}
    save_file(tensors, tmp_path / "valid", {"format": "pt", "brackets": '}]"{['})
    data = (tmp_path / "valid").read_bytes()
    random = Random(4)
    found = {read(tmp_path / "a", hostile.damaged(data, 700, random), read_header) for _ in range(400)}
    assert read(tmp_path / "a", data, read_header) == "read"
    assert found == {"read", "CheckpointError"}


@pytest.mark.parametrize(
    ("second", "message"),
    [(("b", (8,), 0, 0), "tensors a and b overlap"), (("b", (8,), 0, 8), "tensor b is not aligned to 32 bytes"),
     (("b", (8,), 0, 64), "is truncated: it should hold"), (("b", (8, 1 << 62, 4), 0, 32), "is truncated"),
     (("b", (8,), 0, 1 << 63), "is truncated"), (("a", (8,), 0, 32), "has tensor a twice")],
)  # fmt: skip
def test_places_of_gguf_tensors(tmp_path: Path, second: tuple[str, tuple[int, ...], int, int], message: str) -> None:
    keys = [("general.architecture", hostile.gguf_value("llama"))]
    header = hostile.gguf_header(keys, [("a", (8,), 0, 0), second])
    path = tmp_path / "a.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        gguf_file.read_header(path)


VALUES = (
    ("llama.block_count", "two"), ("llama.block_count", 1 << 31), ("llama.block_count", [2] * 999),
    ("llama.attention.head_count", 0), ("llama.embedding_length", 1 << 60), ("llama.vocab_size", 1 << 30),
    ("llama.expert_count", 1 << 30), ("llama.attention.layer_norm_rms_epsilon", float("nan")),
    ("llama.rope.freq_base", "x"), ("tokenizer.ggml.tokens", "a"), ("tokenizer.ggml.tokens", ["a"]),
    ("tokenizer.ggml.tokens", [1, 2]), ("tokenizer.ggml.scores", [0.5]), ("tokenizer.ggml.token_type", ["a"]),
    ("tokenizer.ggml.merges", [1]), ("tokenizer.ggml.eos_token_id", "x"), ("tokenizer.ggml.bos_token_id", -1),
    ("tokenizer.ggml.bos_token_id", 1 << 40), ("tokenizer.ggml.model", 1), ("tokenizer.chat_template", [1]),
)  # fmt: skip
"""Metadata with another type or size than the model's."""


@pytest.mark.parametrize(("key", "value"), VALUES, ids=lambda value: str(value)[:40])
def test_metadata_of_another_type(valid: Path, tmp_path: Path, key: str, value: object) -> None:
    header = gguf_file.read_header(valid)
    values = {name: stored.read() if isinstance(stored, gguf_file.StoredArray) else stored
              for name, stored in header.metadata.items()}  # fmt: skip
    begin = min(tensor.offset for tensor in header.tensors)
    tensors = [
        (tensor.name, tensor.shape[::-1], int(gguf.GGMLQuantizationType[tensor.type]), tensor.offset - begin)
        for tensor in header.tensors
    ]
    made = hostile.gguf_header(
        [(name, hostile.gguf_value(item)) for name, item in {**values, key: value}.items()], tensors
    )
    path = tmp_path / "a.gguf"
    path.write_bytes(made + bytes(-len(made) % 32) + valid.read_bytes()[begin:])
    opened = GgufCheckpoint.open(path)
    with pytest.raises(RedraftError) as error:  # noqa: PT012  (which of the two refuses depends on the key)
        assert opened.tensors
        opened.write_text_files(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
