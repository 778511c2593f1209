"""Buffers of the host, which the host reads and writes as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from redraft.engines.device import Array, Buffer, check_part, check_values, numpy_type
from redraft.names import Dtype


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """A `redraft.engines.device.Buffer` of the host. `host` is the whole array."""

    dtype: Dtype
    shape: tuple[int, ...]
    host: Array

    @classmethod
    def zeros(cls, dtype: Dtype, *shape: int) -> Self:
        """Allocate a buffer of zeros."""
        return cls(dtype, shape, np.zeros(shape, numpy_type(dtype)))

    @classmethod
    def of(cls, dtype: Dtype, array: Array) -> Self:
        """Return a buffer over the memory of a C-contiguous array."""
        return cls(dtype, array.shape, array)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.host.ctypes.data)

    def write(self, values: Array) -> None:
        """Copy from another array, which may be reused at once."""
        check_values(self, values)
        self.host[...] = values

    def read(self) -> Array:
        """Return a copy of the buffer."""
        return self.host.copy()

    def part(self, *shape: int, start: int = 0) -> Self:
        """Return the elements from `start` on under another shape, without a copy."""
        check_part(self, shape, start)
        elements = self.host.reshape(-1)[start : start + math.prod(shape)]
        return type(self)(self.dtype, shape, elements.reshape(shape))


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Array:
    """Return an array of zeros whose address is a multiple of `alignment` bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def array_of(buffer: Buffer) -> Array:
    """Return the elements of a buffer of the host."""
    assert buffer.host is not None
    return buffer.host


class ArrayInputs:
    """`redraft.engines.device.HostInputs` of the host, which needs no copy."""

    def __init__(self, buffers: Mapping[str, HostBuffer]) -> None:
        self.buffers = buffers
        self._values = {name: buffer.host for name, buffer in buffers.items()}

    def open(self) -> Mapping[str, Array]:
        """Return the arrays to fill."""
        return self._values

    def send(self) -> None:
        """Return a run that does nothing."""


class ArrayOutputs:
    """`redraft.engines.device.HostOutputs` of the host, which needs no copy."""

    def __init__(self, source: Array) -> None:
        self._source = source
        self.values = np.empty_like(source)

    def fetch(self) -> None:
        """Return a run that does nothing."""
        self.values[...] = self._source
