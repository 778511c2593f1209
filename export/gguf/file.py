"""Reads the header of a GGUF file: its metadata, and the place of each tensor's bytes.

A GGUF file has a magic number, a version, counts, key-value pairs, a table of tensors, then the tensors' bytes. The
file is untrusted: every count, length and offset is compared with the file's size before it is used. Arrays stay in the
file until they are read. The gguf library's own reader checks nothing and takes seconds for a tokenizer's arrays.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.constants import GGUF_DEFAULT_ALIGNMENT
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN

PLAIN_TYPES = ("F32", "F16", "BF16")
TYPES = (*PLAIN_TYPES, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
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
_SEPARATORS = str.maketrans("", "", "-_")
_START = struct.Struct("<4sIQQ")


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
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return (self.shape[-1] if self.shape else 1) // block * block_bytes


@dataclass(slots=True)
class _Cursor:
    """Reads one value after another. Raises ValueError at the file's end, before it allocates memory."""

    data: mmap.mmap
    position: int = 0

    def skip(self, length: int) -> int:
        """Move on by `length` bytes. Returns the position before."""
        if length > len(self.data) - self.position:
            raise ValueError("it ends early")
        begin, self.position = self.position, self.position + length
        return begin

    def integers(self, form: str) -> tuple[int, ...]:
        """Return integers in a format of `struct`."""
        return struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(f"<{form}")))

    def string(self, longest: int = sys.maxsize) -> str:
        """Return a string, whose length is before it."""
        (length,) = self.integers("Q")
        if length > longest:
            raise ValueError("a name is too long")
        begin = self.skip(length)
        return self.data[begin : begin + length].decode()

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        """Return numbers of a type of the metadata."""
        dtype = np.dtype(GGUFReader.gguf_scalar_to_np[kind]).newbyteorder("<")
        values: list[Any] = np.frombuffer(self.data, dtype, count, self.skip(count * dtype.itemsize)).tolist()
        return values

    def value(self) -> Any:
        """Return a value of the metadata, whose type is before it."""
        kind = GGUFValueType(self.integers("I")[0])
        if kind is GGUFValueType.STRING:
            return self.string()
        return self._array() if kind is GGUFValueType.ARRAY else self.numbers(kind, 1)[0]

    def _array(self) -> StoredArray:
        """Move behind an array of numbers or strings. Arrays of arrays are refused."""
        number, count = self.integers("IQ")
        array = StoredArray(self.data, GGUFValueType(number), count, self.position)
        if array.kind is GGUFValueType.STRING:
            for _ in range(count):
                self.skip(self.integers("Q")[0])
        elif array.kind in GGUFReader.gguf_scalar_to_np:
            self.skip(count * np.dtype(GGUFReader.gguf_scalar_to_np[array.kind]).itemsize)
        else:
            raise ValueError("an array of arrays")
        return array


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the metadata, whose values stay in the file until `read`."""

    data: mmap.mmap
    kind: GGUFValueType
    count: int
    begin: int

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"a list of {self.count} values"

    def read(self) -> list[Any]:
        """Return the values. Raises ValueError for strings that are not UTF-8."""
        cursor = _Cursor(self.data, self.begin)
        if self.kind is GGUFValueType.STRING:
            return [cursor.string() for _ in range(self.count)]
        return cursor.numbers(self.kind, self.count)


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

    def integer(self, key: str, default: int) -> int:
        """Return an integer of the metadata. Raises CheckpointError for another type."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise CheckpointError(
                f"{self.path}: expected a whole number for {key}, found {value!r:.60}", DOWNLOAD_AGAIN
            )
        return value


def read_header(path: Path) -> Header:
    """Read and validate. Raises CheckpointError for a damaged file, UnsupportedModelError for another kind of file."""
    tensor_count, key_count = _check_start(path)
    with path.open("rb") as stream:
        cursor = _Cursor(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), _START.size)
    metadata: dict[str, Any] = {}
    try:
        for _ in range(key_count):
            key = cursor.string(LONGEST_NAME)
            if key in metadata:
                raise CheckpointError(f"{path} has the same metadata key twice ({key!r})", DOWNLOAD_AGAIN)
            metadata[key] = cursor.value()
        rows = [_table_row(cursor) for _ in range(tensor_count)]
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated, or its header is damaged", DOWNLOAD_AGAIN) from error
    header = Header(path, metadata, ())
    _check_kind(header)
    alignment = header.integer(gguf.Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path} has an alignment of {alignment}, expected a power of two", DOWNLOAD_AGAIN)
    base = -(-cursor.position // alignment) * alignment
    tensors = tuple(_stored(path, base, *row) for row in rows)
    _check_tensors(path, tensors, alignment, len(cursor.data))
    return Header(path, metadata, tensors)


def check_architecture(header: Header) -> None:
    """Raise UnsupportedModelError for an architecture whose keys transformers does not map. Imports no PyTorch.

    transformers has names of its own for some, with other separators.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    known = {name.translate(_SEPARATORS) for name in GGUF_CONFIG_MAPPING} - set(_SECTIONS)
    if header.architecture.translate(_SEPARATORS) not in known:
        raise UnsupportedModelError(
            f"{header.path}: architecture {header.architecture:.60} is not supported", AS_FOLDER
        )


def _check_start(path: Path) -> tuple[int, int]:
    """Check magic, byte order and version. Returns the numbers of tensors and of metadata keys."""
    with path.open("rb") as stream:
        start = stream.read(_START.size)
    if start[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF", DOWNLOAD_AGAIN)
    if len(start) < _START.size:
        raise CheckpointError(f"{path} is truncated: it has {len(start)} bytes", DOWNLOAD_AGAIN)
    _, version, tensors, keys = _START.unpack(start)
    if version not in READER_SUPPORTED_VERSIONS:
        big_endian = int.from_bytes(start[4:8], "big") in READER_SUPPORTED_VERSIONS
        raise UnsupportedModelError(
            f"{path} is {'big-endian' if big_endian else f'GGUF version {version}'}, expected a little-endian file of "
            f"version {' or '.join(map(str, READER_SUPPORTED_VERSIONS))}",
            "convert the model again with a current llama.cpp",
        )
    if max(tensors, keys) > MOST_ENTRIES:
        raise CheckpointError(
            f"{path} is truncated, or its header is damaged: it promises {tensors} tensors and {keys} metadata keys",
            DOWNLOAD_AGAIN,
        )
    return tensors, keys


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of a tensor."""
    name = cursor.string(LONGEST_NAME)
    (axes,) = cursor.integers("I")
    if axes > MOST_DIMENSIONS:
        raise ValueError(f"{axes} axes")
    shape = cursor.integers(f"{axes}Q")[::-1]
    kind, offset = cursor.integers("IQ")
    return name, shape, kind, offset


def _check_kind(header: Header) -> None:
    """Refuse files without a whole language model."""
    path, metadata = header.path, header.metadata
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
    parts = header.integer("split.count", 1)
    if parts > 1:
        raise UnsupportedModelError(
            f"{path} is part {header.integer('split.no', 0) + 1} of {parts}",
            "merge the parts first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf",
        )


def _stored(path: Path, base: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> Stored:
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has the unknown type {number}", f"{OTHER_TYPE}, or {DOWNLOAD_AGAIN}"
        ) from None
    if kind.name not in TYPES:
        raise UnsupportedModelError(f"{path}: type {kind.name} of tensor {name} is not supported", OTHER_TYPE)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape) or (shape[-1] if shape else 1) % block:
        raise CheckpointError(f"{path}: tensor {name} of type {kind.name} cannot be {list(shape)}", DOWNLOAD_AGAIN)
    return Stored(name, kind.name, shape, base + offset, math.prod(shape) // block * block_bytes)


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
