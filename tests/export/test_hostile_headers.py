"""Headers of GGUF and safetensors files are untrusted: each is read or refused in one line, within the file's size."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from redraft.errors import CheckpointError, RedraftError
from redraft.export.checkpoint.safetensors import read_header
from redraft.export.gguf import file as gguf_file
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export.gguf_files import random_file

MOST_BYTES = 3 << 20
"""Memory beyond that of the file: of a name, a place and a shape for each of a few thousand tensors or keys."""
HUGE = (0, 1, 2, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, (1 << 64) - 1)
"""Counts, lengths and offsets."""
STRING, ARRAY = 8, 9
ODD: tuple[Any, ...] = (-1, 0, 3, 1 << 62, 0.5, float("nan"), True, "", "\0", "x" * 3000, [], [1, 2, 3], ["a"])
"""Values of metadata in place of the right ones."""


def gguf_string(text: str) -> bytes:
    """A string with its length."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    """A value of metadata with its type."""
    if isinstance(value, list):
        items = [gguf_value(item) for item in value or [0]]
        return struct.pack("<I", ARRAY) + items[0][:4] + struct.pack("<Q", len(value)) + b"".join(i[4:] for i in items)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + gguf_string(value)
    kind, code = {bool: (7, "?"), int: (11, "q"), float: (12, "d")}[type(value)]
    return struct.pack(f"<I{code}", kind, value)


LLAMA = ("general.architecture", gguf_value("llama"))


def gguf_header(
    keys: Sequence[tuple[str, bytes]], tensors: Sequence[tuple[str, Sequence[int], int, int]] = (),
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """A header of these keys with packed values, and of tensors as name, axes, type and offset."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, *(counts or (len(tensors), len(keys))))]
    parts += [gguf_string(key) + value for key, value in keys]
    for name, axes, kind, offset in tensors:
        parts.append(gguf_string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset))
    return b"".join(parts)


def damaged(valid: bytes, header_bytes: int, random: Random) -> bytes:
    """The file with some bytes of its header changed, or cut short, or with other numbers in it."""
    data = bytearray(valid)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        at = random.randrange(header_bytes)
        changes: list[tuple[int, bytes]] = [
            (1, bytes([data[at] ^ 1 << random.randrange(8)])),
            (4, struct.pack("<I", random.choice(HUGE) & 0xFFFFFFFF)),
            (8, struct.pack("<Q", random.choice(HUGE))),
            (random.randrange(1, 40), b""),
            (0, random.randbytes(random.randrange(1, 40))),
            (len(data), b""),
        ]
        replaced, new = random.choice(changes)
        data[at : at + replaced] = new
        if at >= len(data):
            break
    return bytes(data)


def read(path: Path, data: bytes, reader: Callable[[Path], Iterable[Any]]) -> str:
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


def gguf_places(path: Path) -> Iterable[Any]:
    return gguf_file.read_header(path).tensors


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_file("llama").write(tmp_path_factory.mktemp("gguf") / "valid.gguf")


HOSTILE_GGUF = {
    "no metadata": gguf_header([LLAMA], counts=(0, 1 << 63)),
    "no table": gguf_header([LLAMA], counts=(1 << 13, 1)),
    "many keys": gguf_header([(f"{n}", gguf_value(0)) for n in range(3000)]),
    "long string": gguf_header([LLAMA, ("a", struct.pack("<IQ", STRING, 1 << 60))]),
    "long list": gguf_header([LLAMA, ("a", struct.pack("<IIQ", ARRAY, 4, 1 << 62))]),
    "long list of strings": gguf_header([LLAMA, ("a", struct.pack("<IIQ", ARRAY, STRING, 1 << 62))]),
    "list of an unknown type": gguf_header([LLAMA, ("a", struct.pack("<IIQ", ARRAY, 13, 1))]),
    "nested lists": gguf_header([LLAMA, ("a", struct.pack("<IIQ", ARRAY, ARRAY, 1) * 3000)]),
    "scalars": gguf_header([LLAMA], [(f"{n}", (), 0, 0) for n in range(3000)]) + bytes(64),
    "five axes": gguf_header([LLAMA], [("a", (2,) * 5, 0, 0)]) + bytes(64),
    "no rows": gguf_header([LLAMA], [("a", (8, 0), 0, 0)]) + bytes(64),
    "no block": gguf_header([LLAMA], [("a", (8,), 2, 0)]) + bytes(64),
    **{f"architecture {odd!r:.20}": gguf_header([(LLAMA[0], gguf_value(odd))], [("a", (8,), 0, 0)]) for odd in ODD},
    **{f"alignment {odd!r:.20}": gguf_header([LLAMA, ("general.alignment", gguf_value(odd))]) for odd in ODD},
}


@pytest.mark.parametrize("kind", HOSTILE_GGUF)
def test_hostile_gguf_headers(tmp_path: Path, kind: str) -> None:
    assert read(tmp_path / "a.gguf", HOSTILE_GGUF[kind], gguf_places) in ("CheckpointError", "UnsupportedModelError")


def test_damaged_gguf_headers(valid: Path, tmp_path: Path) -> None:
    random, data = Random(2), valid.read_bytes()
    header = min(tensor.offset for tensor in gguf_file.read_header(valid).tensors)
    found = {read(tmp_path / "a.gguf", damaged(data, header, random), gguf_places) for _ in range(150)}
    assert found >= {"read", "CheckpointError"}


TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


HOSTILE_SAFETENSORS = {
    "size": {"a": {**TENSOR, "data_offsets": [0, 12]}},
    "dtype": {"a": {**TENSOR, "dtype": "F99", "data_offsets": [16, 0]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "float": {"a": {**TENSOR, "shape": [4.0]}},
    "bool": {"a": {**TENSOR, "shape": [4, True]}},
    "list": {"a": ["F32", [4], [0, 16]]},
    "overflow": {"a": {**TENSOR, "shape": [4, 1 << 63]}},
    "negative": {"a": {**TENSOR, "shape": [-4]}},
    "hole": {"a": {**TENSOR, "data_offsets": [8, 24]}},
    "overlap": {"a": TENSOR, "b": TENSOR},
    "metadata": {"__metadata__": {"a": [1]}, "a": TENSOR},
    "lists": b"[" * 100_000,
    "nested": b'{"a":' * 100_000,
    "digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,16]}}',
    "twice": b"{}{}",
}


@pytest.mark.parametrize("kind", HOSTILE_SAFETENSORS)
def test_hostile_safetensors_headers(tmp_path: Path, kind: str) -> None:
    header = HOSTILE_SAFETENSORS[kind]
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(16)
    assert read(tmp_path / "a", data, read_header) == "CheckpointError"
    with pytest.raises(CheckpointError, match="is truncated"):
        read_header(tmp_path / "a")


def test_damaged_safetensors_headers(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.weight": np.zeros((n, 3), np.float32) for n in range(9)}
    save_file(tensors, tmp_path / "valid", {"format": "pt", "brackets": '}]"{['})
    data = (tmp_path / "valid").read_bytes()
    random = Random(4)
    found = {read(tmp_path / "a", damaged(data, 700, random), read_header) for _ in range(150)}
    assert read(tmp_path / "a", data, read_header) == "read"
    assert found == {"read", "CheckpointError"}


@pytest.mark.parametrize(
    ("second", "message"),
    [(("b", (8,), 0, 0), "tensors a and b overlap"), (("b", (8,), 0, 8), "tensor b is not aligned to 32 bytes"),
     (("b", (8,), 0, 64), "is truncated: it should hold"), (("b", (8, 1 << 62, 4), 0, 32), "is truncated"),
     (("b", (8,), 0, 1 << 63), "is truncated"), (("a", (8,), 0, 32), "has tensor a twice")],
)  # fmt: skip
def test_places_of_gguf_tensors(tmp_path: Path, second: tuple[str, tuple[int, ...], int, int], message: str) -> None:
    header = gguf_header([LLAMA], [("a", (8,), 0, 0), second])
    path = tmp_path / "a.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        gguf_file.read_header(path)


VALUES = (
    ("llama.block_count", "two"), ("llama.block_count", 1 << 31), ("llama.block_count", [2] * 999),
    ("llama.attention.head_count", 0), ("llama.vocab_size", 1 << 30), ("llama.expert_count", 1 << 30),
    ("llama.attention.layer_norm_rms_epsilon", float("nan")), ("tokenizer.ggml.tokens", "a"),
    ("tokenizer.ggml.tokens", [1, 2]), ("tokenizer.ggml.scores", [0.5]), ("tokenizer.ggml.merges", [1]),
    ("tokenizer.ggml.eos_token_id", "x"), ("tokenizer.ggml.bos_token_id", 1 << 40), ("tokenizer.ggml.model", 1),
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
    made = gguf_header([(name, gguf_value(item)) for name, item in {**values, key: value}.items()], tensors)
    path = tmp_path / "a.gguf"
    path.write_bytes(made + bytes(-len(made) % 32) + valid.read_bytes()[begin:])
    opened = GgufCheckpoint.open(path)
    with pytest.raises(RedraftError) as error:  # noqa: PT012  (which of the two refuses depends on the key)
        assert opened.tensors
        opened.write_text_files(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
