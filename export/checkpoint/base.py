"""The parts that checkpoints of all formats share: entries of tensors, JSON files, slabs of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from redraft.errors import CheckpointError

if TYPE_CHECKING:
    from redraft.export.checkpoint.safetensors import Checkpoint
    from redraft.export.gguf.checkpoint import GgufCheckpoint

AnyCheckpoint: TypeAlias = "Checkpoint | GgufCheckpoint"
STORAGE = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""NumPy's types of stored numbers. bfloat16 and float8 are their bits."""
ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in STORAGE.items()}
SLAB_BYTES = 16 << 20
LONGEST_REASON = 200
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


def last_line(error: BaseException) -> str:
    """Return the last line of an error of a library, else its type: at most LONGEST_REASON characters."""
    text = str(error).strip()
    return text.splitlines()[-1].strip()[:LONGEST_REASON] if text else type(error).__name__


def joined(slabs: Iterable[NDArray[np.float32]], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return a tensor of some slabs of its rows. Memory holds it once."""
    whole, begin = np.empty(shape, np.float32), 0
    rows = np.atleast_1d(whole)
    for slab in map(np.atleast_1d, slabs):
        rows[begin : begin + len(slab)] = slab
        begin += len(slab)
    return whole


def not_finite(tensor: str) -> CheckpointError:
    """Return the error for NaN or infinity among the weights."""
    return CheckpointError(f"tensor {tensor} has a number that is not finite", DOWNLOAD_AGAIN)


def row_slices(shape: tuple[int, ...], item_bytes: int) -> Iterator[slice]:
    """Yield slices of the first axis, each of at most `SLAB_BYTES` unless one row is larger."""
    rows = shape[0] if shape else 1
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * item_bytes)
    step = max(1, SLAB_BYTES // row_bytes)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))
