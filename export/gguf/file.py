"""Reads the header of a GGUF file: its metadata, and the place of each tensor's bytes.

A GGUF file has a magic number, a version, counts, key-value pairs, a table of tensors, then the tensors' bytes. The
file is untrusted: every count, length and offset is compared with the file's size before it is used. Arrays stay in the
file until they are read.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN

PLAIN_TYPES = ("F32", "F16", "BF16")
TYPES = (*PLAIN_TYPES, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_ENTRIES = 1 << 14
"""Largest number of metadata keys and of tensors. The largest published models have a few thousand."""
LONGEST_NAME = 1 << 10
"""Bytes of the name of a key or a tensor. ggml allows 64 for a tensor."""
MOST_DIMENSIONS = 4
"""ggml's tensors have at most four axes."""
WHOLE_MODEL = "give the GGUF file of the language model itself"
AS_FOLDER = "give the model's Hugging Face folder instead"
OTHER_TYPE = "give a file of type Q4_K_M, Q8_0 or F16"
_KINDS = {"adapter": "a LoRA adapter", "mmproj": "a vision or audio encoder", "imatrix": "an importance matrix"}
_SECTIONS = ("general", "tokenizer")
"""Entries of transformers' mapping that are no architectures."""
_START = struct.Struct("<4sIQQ")
_LENGTH, _KIND, _ARRAY, _PLACE = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<IQ"), struct.Struct("<IQ")
_STRING, _LIST = 8, 9
_NUMBERS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
"""Formats of numbers by the type of a metadata value."""


@dataclass(frozen=True, slots=True)
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


class _Damaged(ValueError):
    """The header does not hold the promised bytes."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The file's bytes. Reading past their end raises _Damaged, before memory is allocated."""

    mapped: mmap.mmap

    def check(self, begin: int, length: int) -> None:
        """Raise _Damaged if the file does not hold `length` bytes from `begin` on."""
        if length > len(self.mapped) - begin:
            raise _Damaged

    def unpack(self, form: struct.Struct, begin: int) -> tuple[Any, ...]:
        """Return the numbers at `begin`."""
        self.check(begin, form.size)
        return form.unpack_from(self.mapped, begin)

    def string_end(self, begin: int) -> int:
        """Return the end of the string whose length is at `begin`."""
        (length,) = self.unpack(_LENGTH, begin)
        self.check(begin + _LENGTH.size, length)
        return begin + _LENGTH.size + int(length)

    def string(self, begin: int, longest: int = sys.maxsize) -> tuple[str, int]:
        """Return the string whose length is at `begin`, and its end. Raises UnicodeDecodeError."""
        end = self.string_end(begin)
        if end - begin > longest:
            raise _Damaged
        return self.mapped[begin + _LENGTH.size : end].decode(), end


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the metadata, whose values stay in the file until `read`."""

    data: _Bytes
    kind: int
    count: int
    begin: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"a list of {self.count} values"

    def read(self) -> list[Any]:
        """Return the values. Raises ValueError for strings that are not UTF-8."""
        if self.kind == _STRING:
            return list(self._strings())
        form = _NUMBERS[self.kind]
        raw = self.data.mapped[self.begin : self.begin + self.count * form.size]
        return [value for (value,) in form.iter_unpack(raw)]

    def _strings(self) -> Iterator[str]:
        position = self.begin
        for _ in range(self.count):
            value, position = self.data.string(position)
            yield value


@dataclass(frozen=True)
class Header:
    """Metadata by key, and the tensors in stored order. Arrays among the metadata are `StoredArray`."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Stored, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata["general.architecture"])

    def array(self, key: str) -> list[Any]:
        """Return the values of an array of the metadata. Raises CheckpointError if it is none, or is damaged."""
        value = self.metadata.get(key)
        if not isinstance(value, StoredArray):
            raise CheckpointError(f"{self.path}: expected a list for {key}, found {value!r:.60}", DOWNLOAD_AGAIN)
        try:
            return value.read()
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {key} is damaged ({error})", DOWNLOAD_AGAIN) from error


def read_header(path: Path) -> Header:
    """Read and validate. Raises CheckpointError for a damaged file, UnsupportedModelError for another kind of file."""
    count, keys = _check_start(path)
    with path.open("rb") as stream:
        data = _Bytes(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        metadata, position = _metadata(data, keys)
        table, position = _table(data, count, position)
    except (_Damaged, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is truncated, or its header is damaged", DOWNLOAD_AGAIN) from error
    except KeyError as error:
        raise CheckpointError(f"{path} has the same metadata key twice ({error})", DOWNLOAD_AGAIN) from error
    _check_kind(path, metadata)
    alignment = _number(path, metadata, "general.alignment", DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} has an alignment of {alignment}, expected a power of two", DOWNLOAD_AGAIN)
    base = -(-position // alignment) * alignment
    tensors = tuple(_stored(path, base, *row) for row in table)
    _check_tensors(path, tensors, alignment, len(data.mapped))
    return Header(path, metadata, tensors)


def check_architecture(header: Header) -> None:
    """Raise UnsupportedModelError for an architecture whose keys transformers does not map. Imports no PyTorch.

    transformers has names of its own for some, with other separators.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    known = {_plain(name) for name in GGUF_CONFIG_MAPPING} - set(_SECTIONS)
    if _plain(header.architecture) not in known:
        raise UnsupportedModelError(
            f"{header.path}: architecture {header.architecture:.60} is not supported", AS_FOLDER
        )


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _check_start(path: Path) -> tuple[int, int]:
    """Check magic, byte order and version. Returns the numbers of tensors and of metadata keys."""
    with path.open("rb") as stream:
        start = stream.read(_START.size)
    if start[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF", DOWNLOAD_AGAIN)
    if len(start) < _START.size:
        raise CheckpointError(f"{path} is truncated: it has {len(start)} bytes", DOWNLOAD_AGAIN)
    _, little, tensors, keys = _START.unpack(start)
    if little not in VERSIONS:
        found = "big-endian" if int.from_bytes(start[4:8], "big") in VERSIONS else f"GGUF version {little}"
        raise UnsupportedModelError(
            f"{path} is {found}, expected a little-endian file of version {' or '.join(map(str, VERSIONS))}",
            "convert the model again with a current llama.cpp",
        )
    if max(tensors, keys) > MOST_ENTRIES:
        raise CheckpointError(
            f"{path} is truncated, or its header is damaged: it promises {tensors} tensors and {keys} metadata keys",
            DOWNLOAD_AGAIN,
        )
    return tensors, keys


def _metadata(data: _Bytes, count: int) -> tuple[dict[str, Any], int]:
    """Return the metadata and the position after them. Raises KeyError for a key that occurs twice."""
    metadata: dict[str, Any] = {}
    position = _START.size
    for _ in range(count):
        key, position = data.string(position, LONGEST_NAME)
        if key in metadata:
            raise KeyError(key)
        (kind,) = data.unpack(_KIND, position)
        metadata[key], position = _value(data, kind, position + _KIND.size)
    return metadata, position


def _value(data: _Bytes, kind: int, begin: int) -> tuple[Any, int]:
    """Return a metadata value of type `kind`, and its end."""
    if kind == _STRING:
        return data.string(begin)
    if kind == _LIST:
        item, count = data.unpack(_ARRAY, begin)
        array = StoredArray(data, item, count, begin + _ARRAY.size)
        return array, _array_end(array)
    if kind not in _NUMBERS:
        raise _Damaged
    form = _NUMBERS[kind]
    return data.unpack(form, begin)[0], begin + form.size


def _array_end(array: StoredArray) -> int:
    """Return the position after an array of numbers or strings. Arrays of arrays are refused."""
    if array.kind == _STRING:
        position = array.begin
        array.data.check(position, array.count * _LENGTH.size)
        for _ in range(array.count):
            position = array.data.string_end(position)
        return position
    if array.kind not in _NUMBERS:
        raise _Damaged
    length = array.count * _NUMBERS[array.kind].size
    array.data.check(array.begin, length)
    return array.begin + length


def _table(data: _Bytes, count: int, position: int) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return name, shape, type and offset of each tensor, and the position after them."""
    rows = []
    for _ in range(count):
        name, position = data.string(position, LONGEST_NAME)
        (axes,) = data.unpack(_KIND, position)
        if axes > MOST_DIMENSIONS:
            raise _Damaged
        shape = data.unpack(struct.Struct(f"<{axes}Q"), position + _KIND.size)
        position += _KIND.size + 8 * axes
        kind, offset = data.unpack(_PLACE, position)
        position += _PLACE.size
        rows.append((name, tuple(reversed(shape)), kind, offset))
    return rows, position


def _check_kind(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse files without a whole language model."""
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{path} names no architecture (general.architecture)", DOWNLOAD_AGAIN)
    if "adapter.type" in metadata:
        kind = "adapter"
    elif architecture == "clip":
        kind = "mmproj"
    if kind != "model":
        raise UnsupportedModelError(
            f"{path} is {_KINDS.get(str(kind), f'of type {kind!r:.40}')}, not a language model", WHOLE_MODEL
        )
    parts = _number(path, metadata, "split.count", 1)
    if parts > 1:
        raise UnsupportedModelError(
            f"{path} is part {_number(path, metadata, 'split.no', 0) + 1} of {parts}",
            "merge the parts first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf",
        )


def _number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{path}: expected a whole number for {key}, found {value!r:.60}", DOWNLOAD_AGAIN)
    return value


def _stored(path: Path, base: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> Stored:
    try:
        kind = gguf.GGMLQuantizationType(number).name
    except ValueError:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has the unknown type {number}", f"{OTHER_TYPE}, or {DOWNLOAD_AGAIN}"
        ) from None
    if kind not in TYPES:
        raise UnsupportedModelError(f"{path}: type {kind} of tensor {name} is not supported", OTHER_TYPE)
    block, block_bytes = _block(kind)
    if not all(shape) or (shape[-1] if shape else 1) % block:
        raise CheckpointError(f"{path}: tensor {name} of type {kind} cannot be {list(shape)}", DOWNLOAD_AGAIN)
    return Stored(name, kind, shape, base + offset, math.prod(shape) // block * block_bytes)


def _block(kind: str) -> tuple[int, int]:
    """Return the numbers and bytes of a block."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(numbers), int(size)


def _check_tensors(path: Path, tensors: tuple[Stored, ...], alignment: int, size: int) -> None:
    """Check that names differ, and that the bytes of tensors are aligned, inside the file and do not overlap."""
    if not tensors:
        raise UnsupportedModelError(f"{path} has no tensors", WHOLE_MODEL)
    by_name = {tensor.name: tensor for tensor in tensors}
    for tensor in tensors:
        if by_name[tensor.name] is not tensor:
            raise CheckpointError(f"{path} has tensor {tensor.name} twice", DOWNLOAD_AGAIN)
        if tensor.offset % alignment:
            raise CheckpointError(f"{path}: tensor {tensor.name} is not aligned to {alignment} bytes", DOWNLOAD_AGAIN)
    end = max(tensor.offset + tensor.length for tensor in tensors)
    if end > size:
        raise CheckpointError(f"{path} is truncated: it should hold {end} bytes and holds {size}", DOWNLOAD_AGAIN)
    for one, other in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if one.offset + one.length > other.offset:
            raise CheckpointError(f"{path}: tensors {one.name} and {other.name} overlap", DOWNLOAD_AGAIN)
