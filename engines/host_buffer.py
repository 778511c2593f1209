"""Buffers of the host, which the host reads and writes as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from redraft.engines.device import Array, Buffer, check_part, check_values, numpy_type
from redraft.names import Dtype


@dataclass(frozen=True, eq=False)
class HostBuffer:
    """See `redraft.engines.device.Buffer`. `host` is all of it."""

    dtype: Dtype
    shape: tuple[int, ...]
    host: Array

    @classmethod
    def zeros(cls, dtype: Dtype, *shape: int) -> Self:
        """A buffer of its own."""
        return cls(dtype, shape, np.zeros(shape, numpy_type(dtype)))

    @classmethod
    def of(cls, dtype: Dtype, array: Array) -> Self:
        """The memory of a C-contiguous array."""
        return cls(dtype, array.shape, array)

    @property
    def address(self) -> int:
        """See `Buffer.address`."""
        return int(self.host.ctypes.data)

    def write(self, values: Array) -> None:
        """See `Buffer.write`."""
        check_values(self, values)
        self.host[...] = values

    def read(self) -> Array:
        """See `Buffer.read`."""
        return self.host.copy()

    def part(self, *shape: int, start: int = 0) -> Self:
        """See `Buffer.part`."""
        check_part(self, shape, start)
        elements = self.host.reshape(-1)[start : start + math.prod(shape)]
        return type(self)(self.dtype, shape, elements.reshape(shape))


def array_of(buffer: Buffer) -> Array:
    """The elements of a buffer of the host."""
    assert buffer.host is not None
    return buffer.host


class ArrayInputs:
    """See `redraft.engines.device.HostInputs`: what is filled in is there already."""

    def __init__(self, buffers: Mapping[str, HostBuffer]) -> None:
        self.buffers = buffers
        self._values = {name: buffer.host for name, buffer in buffers.items()}

    def open(self) -> Mapping[str, Array]:
        """See `HostInputs.open`."""
        return self._values

    def send(self) -> None:
        """See `HostInputs.send`."""


class ArrayOutputs:
    """See `redraft.engines.device.HostOutputs`."""

    def __init__(self, source: Array) -> None:
        self._source = source
        self.values = np.empty_like(source)

    def fetch(self) -> None:
        """See `HostOutputs.fetch`."""
        self.values[...] = self._source
