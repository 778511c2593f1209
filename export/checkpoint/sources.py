"""Sources of a module's parameters: a checkpoint, random numbers, rows of another source, or two of these."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from redraft.errors import CheckpointError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, ITEM_BYTES, AnyCheckpoint, TensorEntry, row_slices
from redraft.export.checkpoint.stored_tensor import StoredTensor, entries, evaluate, narrow
from redraft.export.checkpoint.weight_files import FOLDER, NewTensor, Slabs, write
from redraft.export.quantization.rounding import Coded, StoredGrid
from redraft.files import link_or_copy
from redraft.names import WeightRef

LINK_FROM_BYTES = 256 << 20
RANDOM_STD = 0.02
POOL = ("random.normal", "random.ones", "random.zeros")
POOL_SHIFT, POOL_SHIFTS = 256, 1024
"""Random matrices begin at one of POOL_SHIFTS multiples of POOL_SHIFT numbers."""
_POOL_BLOCK = 1 << 20
AnySource: TypeAlias = "Source | RandomSource | RowsSource | DrafterSource"


@dataclass(frozen=True)
class Source:
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
        """Return the parameter's place in the checkpoint, or None if it is computed from stored tensors."""
        return self.tensors[parameter].entry

    def names(self, parameter: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that hold the parameter."""
        return tuple(entry.name for entry in entries(self.tensors[parameter]))

    def link(self, parameter: str, folder: Path) -> str:
        """Put the file that has the parameter below `folder`, once. Returns its path there."""
        entry = self.tensors[parameter].entry
        assert entry is not None
        file = f"{FOLDER}/{self.prefix}{entry.file}"
        if not (folder / file).exists():
            _link(self.checkpoint.path / entry.file, folder / file)
        return file

    def slabs(self, parameter: str) -> Slabs:
        """Yield the parameter in fp32, a few rows at a time, a computed one whole. Raises CheckpointError for NaN."""
        tensor = self.tensors[parameter]
        stored = tensor.entry
        parts = iter([evaluate(tensor, self.checkpoint)]) if stored is None else self.checkpoint.slabs(stored)
        for part in parts:
            if not np.isfinite(part).all():
                raise not_finite(parameter, self.names(parameter))
            yield part

    def rows(self, parameter: str, begin: int, end: int) -> NDArray[np.float32]:
        """Return some rows of a stored parameter in fp32."""
        stored = narrow(self.tensors[parameter], begin, end).entry
        assert stored is not None, "it is computed from stored tensors"
        return np.concatenate(list(self.checkpoint.slabs(stored)))

    def grid(self, parameter: str) -> StoredGrid | None:
        """Return the grid that the parameter is stored on. Reading it raises CheckpointError for NaN."""
        entry = self.tensors[parameter].entry
        grid = None if entry is None else self.checkpoint.grid(entry)
        return grid and replace(grid, slabs=partial(self._finite, parameter, grid))

    def _finite(self, parameter: str, grid: StoredGrid) -> Iterator[Coded]:
        for codes, found in grid.slabs():
            if not all(np.isfinite(x).all() for x in (found.scales, found.offsets) if x is not None):
                raise not_finite(parameter, self.names(parameter))
            yield codes, found


def not_finite(parameter: str, names: tuple[str, ...]) -> CheckpointError:
    """Return the error for NaN or infinity among the weights."""
    stored = names[0] if names else parameter
    return CheckpointError(f"tensor {stored} has a number that is not finite", DOWNLOAD_AGAIN)


@dataclass(frozen=True)
class RandomSource:
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
        made = [
            NewTensor(name, dtype, (size,), partial(_random_slabs, name, 0, (size,)))
            for name, size in zip(POOL, sizes, strict=True)
        ]
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return cls(parameters, tuple(write(made, folder, f"{FOLDER}/{file}.safetensors")))

    def stored(self, parameter: str) -> TensorEntry | None:
        """Return the parameter's part of the pool, which has no tensor name."""
        kind, begin = self._piece(parameter)
        ref, shape = self.pool[POOL.index(kind)], self.parameters[parameter]
        item_bytes = ITEM_BYTES[ref.dtype]
        length = math.prod(shape) * item_bytes
        return TensorEntry("", Path(ref.file).name, ref.dtype, shape, ref.offset + begin * item_bytes, length)

    def grid(self, parameter: str) -> StoredGrid | None:
        """Return None: random numbers have no grid."""

    def link(self, parameter: str, folder: Path) -> str:
        """Return the pool's file, which exists already."""
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
class RowsSource:
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

    def stored(self, parameter: str) -> TensorEntry | None:
        """Return None: no checkpoint has these rows as one tensor."""

    def link(self, parameter: str, folder: Path) -> str:
        """Raise TypeError: there is no file to put below `folder`."""
        raise TypeError(f"{parameter} is in no file")

    def grid(self, parameter: str) -> StoredGrid | None:
        """Return the grid of the source's parameter, for these rows."""
        grid = self.source.grid(self.parameter)
        return grid and replace(grid, slabs=partial(self._coded, grid))

    def _coded(self, grid: StoredGrid) -> Iterator[Coded]:
        begin = 0
        for codes, found in grid.slabs():
            here = self._here(begin, len(codes))
            begin += len(codes)
            if len(here):
                yield codes[here], found[here]

    def slabs(self, parameter: str) -> Slabs:
        """Yield the rows in fp32, a few at a time."""
        begin = 0
        for slab in self.source.slabs(self.parameter):
            here = self._here(begin, len(slab))
            begin += len(slab)
            if len(here):
                yield slab[here]

    def _here(self, begin: int, count: int) -> NDArray[np.int64]:
        """Return those of the rows `begin` to `begin + count` that are wanted, counted from `begin`."""
        first, last = np.searchsorted(self.rows, (begin, begin + count))
        return self.rows[first:last] - begin


@dataclass(frozen=True)
class DrafterSource:
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
        """Return the parameter's place in the checkpoint that has it."""
        return self._of(parameter).stored(parameter)

    def link(self, parameter: str, folder: Path) -> str:
        """Put the file that has the parameter below `folder`, once. Returns its path there."""
        return self._of(parameter).link(parameter, folder)

    def grid(self, parameter: str) -> StoredGrid | None:
        """Return the grid that the parameter is stored on, if there is one."""
        return self._of(parameter).grid(parameter)

    def slabs(self, parameter: str) -> Slabs:
        """Yield the parameter in fp32, a few rows at a time."""
        return self._of(parameter).slabs(parameter)


def _link(source: Path, target: Path) -> None:
    """Copy a small file, since onnx's own loader refuses hard links; make a hard link of a large one."""
    if source.stat().st_size >= LINK_FROM_BYTES:
        link_or_copy(source, target)
    else:
        shutil.copyfile(source, target)
