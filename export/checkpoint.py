"""A Hugging Face checkpoint on disk, read without loading it: configuration, and where every tensor's bytes lie.

A safetensors file is eight bytes (little-endian header length), a JSON header, then the tensors' bytes; a header entry
gives `dtype`, `shape` and `data_offsets` relative to the end of the header.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "BOOL": 1,
}
STORAGE = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "BF16": "<u2", "F16": "<f2", "U8": "u1", "I8": "i1"}
AUXILIARY_TENSORS = ("mtp.",)
"""Prefixes of tensors that belong to a checkpoint without being part of the verifier."""
MAX_HEADER_BYTES = 100_000_000
DOWNLOAD_AGAIN = "download or copy the checkpoint again"


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: `offset` and `length` are bytes in `file`, counted from the file's first byte."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint directory: every file present, every tensor's bytes inside its file."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: str | Path, weights: bool = True) -> Checkpoint:
        """Read and validate. Raises CheckpointError naming the file or tensor at fault.

        Without `weights` only the configuration is read, and `tensors` is empty.
        """
        root = Path(path)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a directory", "give the directory of a Hugging Face checkpoint")
        config = _read_json(root / "config.json", f"{root} is no Hugging Face checkpoint: it has no config.json")
        tensors: dict[str, TensorEntry] = {}
        if not weights:
            return cls(root, config, tensors)
        for file in _shards(root):
            for entry in read_header(root / file):
                if not entry.name.startswith(AUXILIARY_TENSORS):
                    tensors[entry.name] = entry
        missing = sorted(n for n in _indexed(root) if n not in tensors and not n.startswith(AUXILIARY_TENSORS))
        if missing:
            raise CheckpointError(f"{root}: tensor {missing[0]} is in the index but in no shard", DOWNLOAD_AGAIN)
        return cls(root, config, tensors)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files that hold the tensors, sorted."""
        return tuple(sorted({entry.file for entry in self.tensors.values()}))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.length for entry in self.tensors.values())

    def memmap(self, name: str) -> NDArray[Any]:
        """The tensor's bytes as a read-only memory map; bfloat16 comes as uint16."""
        entry = self.tensors[name]
        if 0 in entry.shape:
            return np.zeros(entry.shape, STORAGE[entry.dtype])
        return np.memmap(self.path / entry.file, STORAGE[entry.dtype], "r", entry.offset, entry.shape)

    def digest(self, file: str) -> str:
        """SHA-256 of one of the checkpoint's files, hexadecimal."""
        with open(self.path / file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


def read_header(path: Path) -> Iterator[TensorEntry]:
    """Entries of a safetensors file, in stored order. Raises CheckpointError when the file is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = int.from_bytes(stream.read(8), "little")
        if size < 8 or prefix > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is truncated or no safetensors file", DOWNLOAD_AGAIN)
        try:
            header = json.loads(stream.read(prefix))
            entries = [_entry(name, path.name, 8 + prefix, value) for name, value in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has a damaged header ({error})", DOWNLOAD_AGAIN) from error
    end = max((entry.offset + entry.length for entry in entries), default=8 + prefix)
    if end > size:
        raise CheckpointError(f"{path} is truncated: it should hold {end} bytes and holds {size}", DOWNLOAD_AGAIN)
    return iter(entries)


def _entry(name: str, file: str, base: int, value: dict[str, Any]) -> TensorEntry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    fits = dtype not in ITEM_BYTES or end - begin == math.prod(shape) * ITEM_BYTES[dtype]
    if begin < 0 or end < begin or not fits:
        raise ValueError(f"tensor {name} of shape {list(shape)} does not fit its {end - begin} bytes")
    return TensorEntry(name, file, dtype, shape, base + begin, end - begin)


def _shards(root: Path) -> list[str]:
    index = _indexed(root)
    single = [p.name for p in (root / "model.safetensors",) if p.is_file()]
    files = sorted(set(index.values())) or single or sorted(p.name for p in root.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{root} has no *.safetensors file", "convert it with `save_pretrained(..., safe_serialization=True)`"
        )
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{root}: the index names {file!r}, outside the checkpoint", DOWNLOAD_AGAIN)
        if not (root / file).is_file():
            raise CheckpointError(f"{root}: shard {file} is missing", DOWNLOAD_AGAIN)
    return files


def _indexed(root: Path) -> dict[str, str]:
    path = root / "model.safetensors.index.json"
    if not path.exists():
        return {}
    weight_map = _read_json(path, "").get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no weight_map", DOWNLOAD_AGAIN)
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_json(path: Path, absent: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(absent, "give the directory of a Hugging Face checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})", DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", DOWNLOAD_AGAIN)
    return value
