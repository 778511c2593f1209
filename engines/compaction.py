"""`step.compact_kv` by redraft's kernel: one launch moves the accepted rows of all KV buffers that are not in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import numpy as np

from redraft import names
from redraft.engines.device import Buffer, CapturedRun, Device, Program, Run
from redraft.engines.manifest import GraphRecord
from redraft.names import TensorSpec
from redraft.plugins.library import DTYPES, HEAD_DIMS, CompactArgs

_ENTRY_BYTES = 8
"""Bytes of an element of a path, which is int64."""


class Compact(Protocol):
    """A library that launches the kernel: `redraft.plugins.library.Kernels`."""

    def compact(self, args: CompactArgs, stream: int = 0) -> None:
        """Make the rows of accepted nodes contiguous in all caches."""


class CompactProgram(Program):
    """`step.compact_kv` as a kernel. stream: CUDA stream of the launch. Lengths and paths are in device memory."""

    def __init__(self, record: GraphRecord, device: Device, kernels: Compact, stream: int = 0) -> None:
        super().__init__(record)
        self._device = device
        self._kernels = kernels
        self._stream = stream

    def _bind(self, buffers: Mapping[str, Buffer]) -> Run:
        caches = [buffers[spec.name] for spec in _caches(self.inputs)]
        path = buffers[names.PATH]
        sequences, nodes = path.shape
        _, kv_heads, capacity, head_dim = caches[0].shape
        addresses = self._device.empty("int64", len(caches))
        addresses.write(np.array([cache.address for cache in caches], np.int64))
        lengths = self._device.empty("int64", sequences)
        lengths.write(np.full(sequences, nodes - 1, np.int64))
        # The kernel's paths begin after the root: one entry later, with `nodes - 1` entries in rows of `nodes`, so that
        # the last row ends with the buffer. Entries after the accepted ones are their own index and stay.
        args = CompactArgs(
            dtype=DTYPES[caches[0].dtype], cache_count=len(caches), batch=sequences, kv_heads=kv_heads,
            head_dim=head_dim, capacity=capacity, max_path=nodes, caches=addresses.address,
            cache_len=buffers[names.CACHE_LEN].address, paths=path.address + _ENTRY_BYTES, path_lengths=lengths.address,
        )  # fmt: skip
        return CapturedRun(partial(self._kernels.compact, args, self._stream), (addresses, lengths, dict(buffers)))


def can_compact(record: GraphRecord) -> bool:
    """Return True if the kernel supports the KV buffers' element type and head size."""
    return all(spec.dtype in DTYPES and spec.shape[3] in HEAD_DIMS for spec in _caches(record.inputs))


def _caches(inputs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    return [spec for spec in inputs if spec.name not in (names.PATH, names.CACHE_LEN)]
