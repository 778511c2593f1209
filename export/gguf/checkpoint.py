"""A GGUF file as a checkpoint: its configuration, and its tensors by their Hugging Face names, dequantized in slabs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import CheckpointError
from redraft.export.checkpoint.base import AnyCheckpoint, TensorEntry, row_slices
from redraft.export.checkpoint.safetensors import Checkpoint

if TYPE_CHECKING:
    from redraft.export.checkpoint.stored_grid import StoredGrid
    from redraft.export.gguf.file import Header, Stored
    from redraft.export.gguf.names import Parameter, TensorMap

SUFFIX = ".gguf"
CONVERTED = "GGUF "
"""Prefix of the types of tensors whose bytes cannot be used in place."""


def open_checkpoint(path: Path, weights: bool = True) -> AnyCheckpoint:
    """Open a checkpoint's folder or a GGUF file. Raises like `Checkpoint.open`; errors inside a GGUF file come later.

    Without `weights`, it reads only the configuration, and `tensors` is empty.
    """
    return GgufCheckpoint.open(path, weights) if path.suffix == SUFFIX else Checkpoint.open(path, weights)


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file. Tensors are read on demand, since that needs torch."""

    file: Path
    weights: bool = True

    @classmethod
    def open(cls, file: Path, weights: bool = True) -> GgufCheckpoint:
        """Open the file; without `weights`, it has no tensors. Raises CheckpointError if there is no such file."""
        if not file.is_file():
            raise CheckpointError(f"there is no file {file}", "check the path of the GGUF file")
        return cls(file, weights)

    @property
    def path(self) -> Path:
        """The folder of the file."""
        return self.file.parent

    @property
    def files(self) -> tuple[str, ...]:
        """The file's name."""
        return (self.file.name,)

    @cached_property
    def header(self) -> Header:
        """Metadata and table of tensors. Raises CheckpointError and UnsupportedModelError."""
        from redraft.export.gguf.file import read_header

        return read_header(self.file)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of a config.json. Raises UnsupportedModelError naming a key that is not supported."""
        from redraft.export.gguf.config import ROPE_FACTORS, read_config

        factors = next((tensor for tensor in self.header.tensors if tensor.name == ROPE_FACTORS), None)
        return read_config(self.header, None if factors is None else self._dequantized(factors).ravel())

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters that the file's tensors hold, by Hugging Face names. Raises like `TensorMap.parameters`."""
        return self._map.parameters()

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """Entries by the names of a Hugging Face checkpoint."""
        if not self.weights:
            return {}
        return {name: self._entry(parameter) for name, parameter in self.parameters.items()}

    @property
    def modules(self) -> dict[str, TensorEntry]:
        """Nothing: modules that predict several tokens are not read from GGUF files."""
        return {}

    @property
    def readable(self) -> tuple[str, ...]:
        """The types of the file's entries. `read_header` refuses others."""
        return tuple(sorted({entry.dtype for entry in self.tensors.values()}))

    def is_finite(self, entry: TensorEntry) -> bool:
        """Return True if a tensor has finite numbers only. Reads it once."""
        return all(np.isfinite(slab).all() for slab in self.slabs(entry))

    def slabs(self, entry: TensorEntry) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor, or a contiguous part of one, in fp32, a few rows at a time."""
        parameter = self.parameters[entry.name]
        shape = parameter.stored.shape
        if parameter.whole:
            values = self._map.process(parameter.source, self._dequantized(parameter.stored).reshape(shape))
            begin, count = self._rows(entry)
            yield values[begin : begin + count].reshape(entry.shape).astype(np.float32)
        elif len(shape) < 2:
            begin, count = self._rows(entry)
            yield self._dequantized(parameter.stored).ravel()[begin : begin + count].reshape(entry.shape)
        else:
            for packed in self._packed(entry):
                values = dequantized(packed, parameter.stored.type)
                yield values if len(entry.shape) > 1 else values.reshape(entry.shape)

    def grid(self, entry: TensorEntry) -> StoredGrid | None:
        """Return the grid that a tensor is stored on, None for numbers."""
        from redraft.export.gguf.grids import stored_grid

        parameter = self.parameters[entry.name]
        if parameter.whole or len(entry.shape) < 2:
            return None
        return stored_grid(parameter.stored.type, lambda: self._packed(entry))

    def inexact(self) -> tuple[str, ...]:
        """Return a sentence for each part of the file that a bundle stores in another form."""
        from redraft.export.gguf.tokenizer import unknown_split

        return unknown_split(self.header)

    def write_text_files(self, folder: Path) -> None:
        """Write tokenizer, chat template and special tokens as a Hugging Face checkpoint has them."""
        from redraft.export.gguf.tokenizer import write_text_files

        write_text_files(self.header, folder)

    @cached_property
    def _map(self) -> TensorMap:
        from redraft.export.gguf.names import TensorMap

        return TensorMap(self.header, self.config)

    def _entry(self, parameter: Parameter) -> TensorEntry:
        stored = parameter.stored
        dtype = stored.type if parameter.as_stored else CONVERTED + stored.type
        length = 4 * math.prod(parameter.shape) if parameter.whole else stored.length  # a multiple of the tensor's rows
        return TensorEntry(parameter.name, self.file.name, dtype, parameter.shape, stored.offset, length)

    def _rows(self, entry: TensorEntry) -> tuple[int, int]:
        """Return the first row and number of rows of a part of a tensor; in a vector, each number is a row."""
        parameter = self.parameters[entry.name]
        row_bytes = self.tensors[entry.name].length // (parameter.shape or (1,))[0]
        return (entry.offset - parameter.stored.offset) // row_bytes, entry.length // row_bytes

    def _packed(self, entry: TensorEntry) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a matrix or a part of one in the order of its rows, a few rows at a time."""
        parameter = self.parameters[entry.name]
        mapped, (begin, count) = self._mapped(parameter.stored), self._rows(entry)
        for part in row_slices((count, *parameter.stored.shape[1:]), 4):
            rows = slice(begin + part.start, begin + part.stop)
            yield np.ascontiguousarray(mapped[rows if parameter.order is None else parameter.order[rows]])

    def _mapped(self, stored: Stored) -> NDArray[np.uint8]:
        """Return the bytes of a stored tensor, [rows, bytes]. A vector is one row."""
        shape = (stored.length // stored.row_bytes, stored.row_bytes)
        return np.memmap(self.file, np.uint8, "r", stored.offset, shape)

    def _dequantized(self, stored: Stored) -> NDArray[np.float32]:
        return dequantized(np.ascontiguousarray(self._mapped(stored)), stored.type)


def dequantized(packed: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Return stored rows, uint8 [rows, bytes], in fp32, [rows, columns]."""
    import gguf

    with np.errstate(all="ignore"):
        return np.asarray(gguf.dequantize(packed, gguf.GGMLQuantizationType[kind]), np.float32)
