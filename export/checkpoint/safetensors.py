"""A Hugging Face checkpoint on disk, read without loading it: configuration, and the place of every tensor's bytes.

A safetensors file is eight bytes (little-endian header length), a JSON header, then the tensors' bytes. A header entry
has `dtype`, `shape` and `data_offsets` relative to the end of the header. The file is untrusted: the safetensors
library validates the header before Python reads it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import CheckpointError
from redraft.export.checkpoint import base
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, STORAGE, TensorEntry, read_json_object, row_slices

if TYPE_CHECKING:
    from redraft.export.checkpoint.stored_grid import StoredGrid

MODULE_PREFIXES = ("mtp.", "model.mtp_layers.")
"""Prefixes of tensors of modules that predict several tokens, which the verifier does not have."""
LAYER_PREFIX = re.compile(r"model\.layers\.(\d+)\.")
MODULE_MARKS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Names of tensors, after the layer's prefix, that only such modules have. Their layers follow the verifier's."""
MOST_TENSORS = 1 << 16
"""Largest number of tensors in a file."""


def check_folder(root: Path) -> None:
    """Raise CheckpointError for a folder of GGUF files, which are not parts of one checkpoint."""
    if (single := next(root.glob("*.gguf"), None)) and not (root / "config.json").exists():
        raise CheckpointError(f"{root} has GGUF files and no config.json", f"give the file itself: {single}")


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint directory: every file present, every tensor's bytes inside its file.

    modules: tensors of modules that predict several tokens, which are none of `tensors`.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    modules: dict[str, TensorEntry] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, weights: bool = True) -> Checkpoint:
        """Read and validate. Raises CheckpointError naming the invalid file or tensor.

        Without `weights`, it reads only the configuration, and `tensors` is empty.
        """
        root = Path(path)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a directory", "give the directory of a Hugging Face checkpoint")
        check_folder(root)
        config = _read_json(root / "config.json", f"{root} is not a Hugging Face checkpoint: it has no config.json")
        if not weights:
            return cls(root, config, {})
        stored = {entry.name: entry for file in _shards(root) for entry in read_header(root / file)}
        missing = sorted(n for n in _indexed(root) if n not in stored and not n.startswith(MODULE_PREFIXES))
        if missing:
            raise CheckpointError(f"{root}: tensor {missing[0]} is in the index but in no shard", DOWNLOAD_AGAIN)
        modules = set(_of_modules(stored, config))
        tensors = {name: entry for name, entry in stored.items() if name not in modules}
        return cls(root, config, tensors, {name: stored[name] for name in stored if name in modules})

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files that hold the tensors, sorted."""
        return tuple(sorted({entry.file for entry in self.tensors.values()}))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.length for entry in self.tensors.values())

    def memmap(self, name: str) -> NDArray[Any]:
        """Return the tensor's bytes as a read-only memory map, bfloat16 as uint16."""
        return self._map(self.tensors[name])

    def _map(self, entry: TensorEntry) -> NDArray[Any]:
        if 0 in entry.shape:
            return np.zeros(entry.shape, STORAGE[entry.dtype])
        return np.memmap(self.path / entry.file, STORAGE[entry.dtype], "r", entry.offset, entry.shape)

    def slabs(self, entry: TensorEntry) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor, or a contiguous part, in fp32, a few rows at a time. Its type must be in `readable`."""
        mapped = self._map(entry)
        for rows in row_slices(mapped.shape, 4):
            yield as_float32(mapped[rows] if mapped.shape else mapped, entry.dtype)

    @property
    def readable(self) -> tuple[str, ...]:
        """The stored types that `slabs` reads."""
        return ("F32", "F16", "BF16")

    def grid(self, entry: TensorEntry) -> StoredGrid | None:
        """Return None: its tensors are numbers, not codes."""

    def is_finite(self, entry: TensorEntry) -> bool:
        """Return True if a tensor of type F32, F16 or BF16 has finite numbers only. Reads it once, slab by slab."""
        bits = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}[entry.dtype]
        exponent = bits({"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[entry.dtype])
        raw = np.ravel(self._map(entry)).view(bits)
        for begin in range(0, raw.size, base.SLAB_BYTES // 4):
            if ((raw[begin : begin + base.SLAB_BYTES // 4] & exponent) == exponent).any():
                return False
        return True


def _of_modules(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of tensors that belong to modules which predict several tokens.

    A layer after the verifier's last one is such a module if it has a tensor of MODULE_MARKS.
    """
    count = config.get("num_hidden_layers")
    layers = {name: int(match[1]) for name in names if (match := LAYER_PREFIX.match(name))}
    marked = {layer for name, layer in layers.items() if LAYER_PREFIX.sub("", name, count=1) in MODULE_MARKS}
    marked = {layer for layer in marked if isinstance(count, int) and layer >= count}
    for name in names:
        if name.startswith(MODULE_PREFIXES) or layers.get(name) in marked:
            yield name


def read_header(path: Path) -> list[TensorEntry]:
    """Return the entries of a safetensors file, in stored order. Raises CheckpointError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as validated:
            if len(validated.keys()) > MOST_TENSORS:
                raise ValueError(f"more than {MOST_TENSORS} tensors")
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = []
        for name, value in header.items():
            begin, end = value["data_offsets"]
            shape = tuple(value["shape"])
            entries.append(TensorEntry(name, path.name, value["dtype"], shape, 8 + length + begin, end - begin))
        return entries
    except (SafetensorError, ValueError, TypeError) as error:
        end, size = _end(path), path.stat().st_size
        if end > size:
            line = f"{path} is truncated: it should hold {end} bytes and holds {size}"
        else:
            line = f"{path} is truncated, or has a damaged header ({error!s:.200})"
        raise CheckpointError(line, DOWNLOAD_AGAIN) from error


def _end(path: Path) -> int:
    """Return the size of a file by its header; 0 if the header is damaged."""
    with (
        contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError),
        path.open("rb") as stream,
    ):
        length = int.from_bytes(stream.read(8), "little")
        if length <= path.stat().st_size:
            header = json.loads(stream.read(length))
            return 8 + length + max(int(value["data_offsets"][1]) for value in header.values() if "shape" in value)
    return 0


def _shards(root: Path) -> list[str]:
    index = _indexed(root)
    single = [p.name for p in (root / "model.safetensors",) if p.is_file()]
    files = sorted(set(index.values())) or single or sorted(p.name for p in root.glob("*.safetensors") if p.is_file())
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
        return read_json_object(path)
    except FileNotFoundError as error:
        raise CheckpointError(absent, "give the directory of a Hugging Face checkpoint") from error


def as_float32(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return stored numbers of type F32, F16 or BF16 (as uint16) in fp32."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
