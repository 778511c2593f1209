"""Sources of a module's parameters: a checkpoint, random numbers, another source's rows or factors, or two of these."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from redraft.export.checkpoint.base import ITEM_BYTES, AnyCheckpoint, TensorEntry, not_finite, row_slices
from redraft.export.checkpoint.stored_grid import Coded, StoredGrid
from redraft.export.checkpoint.stored_tensor import StoredTensor, entries, evaluate, narrow
from redraft.export.checkpoint.weight_files import FOLDER, NewTensor, Slabs, write
from redraft.files import link_or_copy
from redraft.names import WeightRef

LINK_FROM_BYTES = 256 << 20
RANDOM_STD = 0.02
POOL = ("random.normal", "random.ones", "random.zeros")
POOL_SHIFT, POOL_SHIFTS = 256, 1024
"""Random matrices begin at one of POOL_SHIFTS multiples of POOL_SHIFT numbers."""
_POOL_BLOCK = 1 << 20
_Slab = TypeVar("_Slab", bound=tuple[Any, ...])
AnySource: TypeAlias = "Source | RandomSource | RowsSource | FactoredSource | DrafterSource"


class _Parameters(ABC):
    """The values of a module's parameters, by name. Subclasses have `parameters`, their shapes."""

    def stored(self, parameter: str) -> TensorEntry | None:
        """Return the parameter's place in a file, or None if it is computed."""
        return None

    def link(self, parameter: str, folder: Path) -> str:
        """Put the file that has the stored parameter below `folder`, once. Returns its path there."""
        raise TypeError(f"{parameter} is in no file")

    def grid(self, parameter: str) -> StoredGrid | None:
        """Return the grid that the parameter is stored on, or None. Reading it raises CheckpointError for NaN."""
        return None

    @abstractmethod
    def slabs(self, parameter: str) -> Slabs:
        """Yield the parameter in fp32, a few rows at a time, a computed one whole. Raises CheckpointError for NaN."""


@dataclass(frozen=True)
class Source(_Parameters):
    """The checkpoint's tensors by the names of the module's parameters.

    tensors: the stored tensors of every parameter.
    prefix:  prefix of the checkpoint's file names in a bundle, since another checkpoint may have equal file names.
    """

    checkpoint: AnyCheckpoint
    parameters: dict[str, tuple[int, ...]]
    tensors: Mapping[str, StoredTensor]
    prefix: str = ""

    @classmethod
    def of_names(cls, checkpoint: AnyCheckpoint, parameters: dict[str, tuple[int, ...]], prefix: str = "") -> Source:
        """Return the source of a module whose parameters have the same names in the checkpoint."""
        tensors = {name: StoredTensor.of(checkpoint.tensors[name]) for name in parameters if name in checkpoint.tensors}
        return cls(checkpoint, parameters, tensors, prefix)

    def stored(self, parameter: str) -> TensorEntry | None:
        return self.tensors[parameter].entry

    def names(self, parameter: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that hold the parameter."""
        return tuple(entry.name for entry in entries(self.tensors[parameter]))

    def link(self, parameter: str, folder: Path) -> str:
        entry = self.tensors[parameter].entry
        assert entry is not None
        file = f"{FOLDER}/{self.prefix}{entry.file}"
        if not (folder / file).exists():
            # onnx's own loader refuses hard links, so that only large files are linked.
            source = self.checkpoint.path / entry.file
            if source.stat().st_size >= LINK_FROM_BYTES:
                link_or_copy(source, folder / file)
            else:
                shutil.copyfile(source, folder / file)
        return file

    def slabs(self, parameter: str) -> Slabs:
        tensor = self.tensors[parameter]
        stored = tensor.entry
        parts = iter([evaluate(tensor, self.checkpoint)]) if stored is None else self.checkpoint.slabs(stored)
        for part in parts:
            self._check_finite(parameter, part)
            yield part

    def rows(self, parameter: str, begin: int, end: int) -> NDArray[np.float32]:
        """Return some rows of a stored parameter in fp32."""
        return evaluate(narrow(self.tensors[parameter], begin, end), self.checkpoint)

    def grid(self, parameter: str) -> StoredGrid | None:
        entry = self.tensors[parameter].entry
        grid = None if entry is None else self.checkpoint.grid(entry)
        return grid and replace(grid, slabs=partial(self._finite, parameter, grid))

    def _finite(self, parameter: str, grid: StoredGrid) -> Iterator[Coded]:
        for codes, rows in grid.slabs():
            self._check_finite(parameter, rows.scales)
            if rows.offsets is not None:
                self._check_finite(parameter, rows.offsets)
            yield codes, rows

    def _check_finite(self, parameter: str, values: NDArray[np.float32]) -> None:
        if not np.isfinite(values).all():
            raise not_finite(next(iter(self.names(parameter)), parameter))


@dataclass(frozen=True)
class RandomSource(_Parameters):
    """Random weights, for latency work only. Every tensor is a part of one pool, so that few bytes are written.

    Parts begin at different places, so that no two matrices of a model are equal.
    pool: the places of normal numbers, ones and zeros, in the order of `POOL`.
    """

    parameters: dict[str, tuple[int, ...]]
    pool: tuple[WeightRef, ...]

    @classmethod
    def write(
        cls, parameters: dict[str, tuple[int, ...]], folder: Path, dtype: str, file: str = "random"
    ) -> RandomSource:
        """Write the pool to `folder`/weights/`file`.safetensors, large enough for the largest parameter."""
        matrices = [math.prod(shape) for shape in parameters.values() if len(shape) > 1]
        vectors = [math.prod(shape) for shape in parameters.values() if len(shape) <= 1]
        sizes = (max(matrices, default=0) + POOL_SHIFTS * POOL_SHIFT, *[max(vectors, default=1)] * 2)
        tensors = [
            NewTensor(name, dtype, (size,), partial(_random_slabs, name, 0, (size,)))
            for name, size in zip(POOL, sizes, strict=True)
        ]
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return cls(parameters, tuple(write(tensors, folder, f"{FOLDER}/{file}.safetensors")))

    def stored(self, parameter: str) -> TensorEntry | None:
        kind, begin = self._piece(parameter)
        ref, shape = self.pool[POOL.index(kind)], self.parameters[parameter]
        item_bytes = ITEM_BYTES[ref.dtype]
        length = math.prod(shape) * item_bytes
        return TensorEntry("", Path(ref.file).name, ref.dtype, shape, ref.offset + begin * item_bytes, length)

    def link(self, parameter: str, folder: Path) -> str:
        return self.pool[0].file

    def slabs(self, parameter: str) -> Slabs:
        """Yield the parameter in fp32: norm gains are one, biases zero, others normal with deviation 0.02."""
        return _random_slabs(*self._piece(parameter), self.parameters[parameter])

    def _piece(self, parameter: str) -> tuple[str, int]:
        """Return the part of the pool that a parameter uses, and the index of its first number."""
        if len(self.parameters[parameter]) > 1:
            return POOL[0], list(self.parameters).index(parameter) % POOL_SHIFTS * POOL_SHIFT
        return POOL[2] if parameter.endswith("bias") else POOL[1], 0


def _random_slabs(kind: str, begin: int, shape: tuple[int, ...]) -> Slabs:
    """Yield numbers of a part of the pool from `begin` on, as rows of `shape`."""
    row = math.prod(shape[1:])
    for rows in row_slices(shape, 4):
        part = (rows.stop - rows.start, *shape[1:])
        if kind == POOL[0]:
            yield _normal(begin + rows.start * row, begin + rows.stop * row).reshape(part)
        else:
            yield np.full(part, POOL.index(kind) == 1, np.float32)


def _normal(begin: int, end: int) -> NDArray[np.float32]:
    """Return numbers `begin` to `end` of an infinite normal sequence, drawn a block at a time."""
    first = begin // _POOL_BLOCK
    blocks = [
        np.random.default_rng(block).standard_normal(_POOL_BLOCK, np.float32)
        for block in range(first, -(-end // _POOL_BLOCK))
    ]
    drawn = np.concatenate(blocks)[begin - first * _POOL_BLOCK : end - first * _POOL_BLOCK]
    drawn *= np.float32(RANDOM_STD)
    return drawn


@dataclass(frozen=True)
class RowsSource(_Parameters):
    """Some rows of a parameter of another source, as the only parameter `name`. They are gathered slab by slab.

    rows: sorted, int64 [R].
    """

    source: AnySource
    parameter: str
    name: str
    rows: NDArray[np.int64]

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shape of the rows, by name."""
        return {self.name: (len(self.rows), *self.source.parameters[self.parameter][1:])}

    def grid(self, parameter: str) -> StoredGrid | None:
        grid = self.source.grid(self.parameter)
        if grid is None:
            return None
        parts = grid.slabs
        return replace(grid, slabs=lambda: ((codes[here], rows[here]) for (codes, rows), here in self._wanted(parts())))

    def slabs(self, parameter: str) -> Slabs:
        parts = ((slab,) for slab in self.source.slabs(self.parameter))
        return (slab[here] for (slab,), here in self._wanted(parts))

    def _wanted(self, slabs: Iterable[_Slab]) -> Iterator[tuple[_Slab, NDArray[np.int64]]]:
        """Yield slabs of all rows that have wanted ones, and the places of these in the slab."""
        begin = 0
        for slab in slabs:
            end = begin + len(slab[0])
            first, last = np.searchsorted(self.rows, (begin, end))
            if first < last:
                yield slab, self.rows[first:last] - begin
            begin = end


@dataclass(frozen=True)
class FactoredSource(_Parameters):
    """A matrix of another source times `basis` [n, r] as the parameter `left`, and `right` [r, n].

    prefix: of the names of both.
    """

    source: AnySource
    parameter: str
    prefix: str
    basis: NDArray[np.float32]
    right: NDArray[np.float32]

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of both factors, by name."""
        rows, rank = self.source.parameters[self.parameter][0], len(self.right)
        return {f"{self.prefix}left": (rows, rank), f"{self.prefix}right": self.right.shape}

    def slabs(self, parameter: str) -> Slabs:
        if parameter == f"{self.prefix}right":
            return iter([self.right])
        return (slab @ self.basis for slab in self.source.slabs(self.parameter))


@dataclass(frozen=True)
class DrafterSource(_Parameters):
    """A drafter's own parameters, and those of its verifier that its graph uses."""

    own: AnySource
    verifier: AnySource

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {**self.verifier.parameters, **self.own.parameters}

    def _of(self, parameter: str) -> AnySource:
        return self.own if parameter in self.own.parameters else self.verifier

    def stored(self, parameter: str) -> TensorEntry | None:
        return self._of(parameter).stored(parameter)

    def link(self, parameter: str, folder: Path) -> str:
        return self._of(parameter).link(parameter, folder)

    def grid(self, parameter: str) -> StoredGrid | None:
        return self._of(parameter).grid(parameter)

    def slabs(self, parameter: str) -> Slabs:
        return self._of(parameter).slabs(parameter)
