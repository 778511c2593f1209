"""The parts that checkpoints of all formats share: entries of tensors, JSON files, slabs of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from redraft.errors import CheckpointError

if TYPE_CHECKING:
    from redraft.export.checkpoint.safetensors import Checkpoint
    from redraft.export.gguf.checkpoint import GgufCheckpoint

AnyCheckpoint: TypeAlias = "Checkpoint | GgufCheckpoint"
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "BOOL": 1,
}
SLAB_BYTES = 16 << 20
DOWNLOAD_AGAIN = "download or copy the checkpoint again"

_FLOAT = "__float__"
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
"""Floats that JSON cannot represent. transformers 5 writes them as {"__float__": "Infinity"}."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `offset` and `length` are bytes in `file`, counted from the file's first byte."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`, with infinities and NaN as floats.

    Raises FileNotFoundError, and CheckpointError if the file is damaged or does not hold an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode_float)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})", DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", DOWNLOAD_AGAIN)
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    """Return the float that an object represents, else the object itself."""
    tag = value.get(_FLOAT)
    return _FLOATS.get(tag, value) if len(value) == 1 and isinstance(tag, str) else value


def row_slices(shape: tuple[int, ...], item_bytes: int) -> Iterator[slice]:
    """Yield slices of the first axis, each of at most `SLAB_BYTES` unless one row is larger."""
    rows = shape[0] if shape else 1
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * item_bytes)
    step = max(1, SLAB_BYTES // row_bytes)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))
