"""Reads the header of a GGUF file: its metadata, and the place of each tensor's bytes.

A GGUF file has a magic number, a version, counts, key-value pairs, a table of tensors, then the tensors' bytes.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from transformers.integrations.gguf import reader

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint import DOWNLOAD_AGAIN

PLAIN_TYPES = ("F32", "F16", "BF16")
TYPES = (*PLAIN_TYPES, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
VERSIONS = (2, 3)
STRINGS = ("tokenizer.ggml.tokens",)
"""Arrays of strings to read. Only the length of others is read."""
DEFAULT_ALIGNMENT = 32
WHOLE_MODEL = "give the GGUF file of the language model itself"
_KINDS = {"adapter": "a LoRA adapter", "mmproj": "a vision or audio encoder", "imatrix": "an importance matrix"}


@dataclass(frozen=True)
class Stored:
    """One tensor of the file: `shape` in PyTorch's order, `offset` and `length` in bytes of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the last axis. Blocks of quantized types do not cross rows."""
        block, block_bytes = _block(self.type)
        return (self.shape[-1] if self.shape else 1) // block * block_bytes


@dataclass(frozen=True)
class Header:
    """Metadata by key, and the tensors in stored order."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Stored, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])


def read_header(path: Path) -> Header:
    """Read and validate. Raises CheckpointError for a damaged file, UnsupportedModelError for another kind of file."""
    _check_start(path)
    try:
        blob = reader._mapped(str(path))  # private, but the version is pinned; the gguf library is 100 times slower
        metadata, count, position = reader._read_metadata(blob, str(path), STRINGS)
        table, position = reader._read_tensor_table(blob, count, position)
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is truncated, or its header is damaged", DOWNLOAD_AGAIN) from error
    if len(metadata) != int.from_bytes(bytes(blob[16:24]), "little"):
        raise CheckpointError(f"{path} has the same metadata key twice", DOWNLOAD_AGAIN)
    _check_kind(path, metadata)
    alignment = _number(path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} has an alignment of {alignment}, expected a power of two", DOWNLOAD_AGAIN)
    base = -(-position // alignment) * alignment
    tensors = tuple(_stored(path, base, *row) for row in table)
    _check_tensors(path, tensors)
    return Header(path, metadata, tensors)


def _check_start(path: Path) -> None:
    """Magic, byte order and version."""
    with path.open("rb") as stream:
        start = stream.read(24)
    if start[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF", DOWNLOAD_AGAIN)
    if len(start) < 24:
        raise CheckpointError(f"{path} is truncated: it has {len(start)} bytes", DOWNLOAD_AGAIN)
    little, big = int.from_bytes(start[4:8], "little"), int.from_bytes(start[4:8], "big")
    if little not in VERSIONS:
        found = "is big-endian" if big in VERSIONS else f"is GGUF version {little}"
        raise UnsupportedModelError(
            f"{path} {found}, expected a little-endian file of version {' or '.join(map(str, VERSIONS))}",
            "convert the model again with a current llama.cpp",
        )


def _check_kind(path: Path, metadata: dict[str, Any]) -> None:
    """Refuse files without a whole language model."""
    kind = str(metadata.get("general.type", "model"))
    if "adapter.type" in metadata:
        kind = "adapter"
    elif metadata["general.architecture"] == "clip":
        kind = "mmproj"
    if kind != "model":
        raise UnsupportedModelError(
            f"{path} is {_KINDS.get(kind, f'of type {kind!r}')}, not a language model", WHOLE_MODEL
        )
    if _number(path, metadata, "split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{path} is part {_number(path, metadata, 'split.no', 0) + 1} of {metadata['split.count']}",
            "merge the parts first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf",
        )


def _number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise CheckpointError(f"{path}: expected a whole number for {key}, found {value!r}", DOWNLOAD_AGAIN)
    return value


def _stored(path: Path, base: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> Stored:
    try:
        kind = gguf.GGMLQuantizationType(number).name
    except ValueError:
        raise CheckpointError(f"{path}: tensor {name} has the unknown type {number}", DOWNLOAD_AGAIN) from None
    if kind not in TYPES:
        raise UnsupportedModelError(
            f"{path}: type {kind} of tensor {name} is not supported", "give a file of type Q4_K_M, Q8_0 or F16"
        )
    block, block_bytes = _block(kind)
    if not all(shape) or (shape[-1] if shape else 1) % block:
        raise CheckpointError(f"{path}: tensor {name} of type {kind} cannot be {list(shape)}", DOWNLOAD_AGAIN)
    return Stored(name, kind, shape, base + offset, math.prod(shape) // block * block_bytes)


def _block(kind: str) -> tuple[int, int]:
    """Return the numbers and bytes of a block."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(numbers), int(size)


def _check_tensors(path: Path, tensors: tuple[Stored, ...]) -> None:
    """Check that each name occurs once, and that all bytes are inside the file."""
    name, times = max(Counter(tensor.name for tensor in tensors).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise CheckpointError(f"{path} has tensor {name} {times} times", DOWNLOAD_AGAIN)
    end, size = max((tensor.offset + tensor.length for tensor in tensors), default=0), path.stat().st_size
    if end > size:
        raise CheckpointError(f"{path} is truncated: it should hold {end} bytes and holds {size}", DOWNLOAD_AGAIN)
