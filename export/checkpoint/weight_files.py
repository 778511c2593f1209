"""Weight files: safetensors written in one pass, tensor by tensor, each in slabs of rows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from redraft.config import Precision
from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint.base import ITEM_BYTES
from redraft.names import WeightRef

FOLDER = "weights"
ONNX_TYPES = {
    "F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16, "U8": ir.DataType.UINT8,
    "I8": ir.DataType.INT8, "I4": ir.DataType.INT4, "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
}  # fmt: skip
STORED: dict[Precision, str] = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "int8": "F32", "int4": "F32", "fp8": "F16",
}  # fmt: skip
"""The stored type of unquantized weights by precision."""
AHEAD = 2
"""Products whose codes are computed while another one is written."""
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


Slabs: TypeAlias = Iterator[NDArray[Any]]


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write. Its type and shape are known before its content is produced, in slabs of rows.

    prepare: computes the content in another thread before `slabs` is read, if it takes long.
    same_as: name of the tensor whose bytes these are. Nothing is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slabs: Callable[[], Slabs]
    prepare: Callable[[], None] | None = None
    same_as: str | None = None

    @property
    def length(self) -> int:
        """Size in bytes."""
        elements = int(np.prod(self.shape, dtype=np.int64))
        return elements // 2 if self.dtype == "I4" else elements * ITEM_BYTES[self.dtype]

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape in the file's header. The format has no type of four bits."""
        return ("U8", (self.length,)) if self.dtype == "I4" else (self.dtype, self.shape)


def write(tensors: list[NewTensor], folder: Path, file: str, progress: Progress = no_progress) -> list[WeightRef]:
    """Write a safetensors file in one pass: the header first, since all sizes are known."""
    written = [tensor for tensor in tensors if tensor.same_as is None]
    offset, header = 0, {}
    for tensor in written:
        dtype, shape = tensor.stored
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + tensor.length]}
        offset += tensor.length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64 + 56)
    refs, total = dict[str, WeightRef](), offset
    with (folder / file).open("wb") as stream, _Ahead(written) as ahead:
        base = stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, tensor in enumerate(written):
            begin = stream.tell()
            progress("weights", begin - base, total)
            ahead.need(index)
            for slab in tensor.slabs():
                stream.write(_encoded(slab, tensor).data)
            assert stream.tell() - begin == tensor.length, tensor.name
            refs[tensor.name] = WeightRef(tensor.name, file, begin, tensor.length, tensor.dtype, tensor.shape)
    progress("weights", total, total)
    for tensor in tensors:
        if tensor.same_as is not None:
            refs[tensor.name] = replace(refs[tensor.same_as], initializer=tensor.name, shape=tensor.shape)
    return list(refs.values())


class _Ahead:
    """Prepares the next tensors in other threads. At most AHEAD of them are in memory."""

    def __init__(self, tensors: list[NewTensor]) -> None:
        self._waiting = deque((i, t.prepare) for i, t in enumerate(tensors) if t.prepare is not None)
        self._running = dict[int, Future[None]]()
        self._pool = ThreadPoolExecutor(AHEAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def need(self, index: int) -> None:
        """Wait for a tensor's preparation, and begin that of the next ones."""
        while self._waiting and self._waiting[0][0] < index + 3 * AHEAD:
            number, prepare = self._waiting.popleft()
            self._running[number] = self._pool.submit(prepare)
        if (running := self._running.pop(index, None)) is not None:
            running.result()


def _encoded(slab: NDArray[Any], tensor: NewTensor) -> NDArray[Any]:
    """Return the slab in the tensor's type, contiguous. Raises UnsupportedModelError for numbers beyond fp16."""
    if tensor.dtype == "F16" and slab.dtype == np.float32:
        with np.errstate(over="ignore"):
            slab = slab.astype(np.float16)
        if not np.isfinite(slab).all():
            raise UnsupportedModelError(f"{tensor.name} has numbers that fp16 cannot hold", "build with bf16 or fp32")
    elif tensor.dtype == "BF16" and slab.dtype == np.float32:
        slab = slab.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.ascontiguousarray(slab)
