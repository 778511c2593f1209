"""Weight files: safetensors written in one pass, tensor by tensor, each in slabs of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from redraft.config import Precision
from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint import ITEM_BYTES
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
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


Slabs: TypeAlias = Iterator[NDArray[Any]]


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write. Its type and shape are known before its content is produced, in slabs of rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slabs: Callable[[], Slabs]

    @property
    def length(self) -> int:
        """Size in bytes."""
        elements = int(np.prod(self.shape, dtype=np.int64))
        return elements // 2 if self.dtype == "I4" else elements * ITEM_BYTES[self.dtype]

    @property
    def stored(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape in the file's header. The format has no type of four bits."""
        return ("U8", (self.length,)) if self.dtype == "I4" else (self.dtype, self.shape)


def write(
    made: list[NewTensor], folder: Path, file: str, progress: Progress = lambda stage, done, total: None
) -> list[WeightRef]:
    """Write a safetensors file in one pass: the header first, since all sizes are known."""
    offset, header = 0, {}
    for tensor in made:
        dtype, shape = tensor.stored
        header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + tensor.length]}
        offset += tensor.length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64 + 56)
    refs, base = [], 8 + len(encoded)
    with (folder / file).open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, tensor in enumerate(made):
            progress("weights", index, len(made))
            begin = stream.tell()
            for slab in tensor.slabs():
                stream.write(_encoded(slab, tensor).data)
            assert stream.tell() - begin == tensor.length, tensor.name
            refs.append(WeightRef(tensor.name, file, begin, tensor.length, tensor.dtype, tensor.shape))
    progress("weights", len(made), len(made))
    assert min(ref.offset for ref in refs) == base
    return refs


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
