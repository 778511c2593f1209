"""Checkpoints of random weights on disk, for measurements: written in shards, a few numbers at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Shapes = Mapping[str, tuple[int, ...]]
STD = 0.02
_NUMBERS = (1 << 22) + 1
"""Numbers drawn once and written repeatedly; an odd count, so that the rows of a matrix differ."""
_TYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}


def write_shards(folder: Path, tensors: Shapes, dtype: str, shard_bytes: int) -> None:
    """Write `tensors` of normal numbers, vectors of ones, to files of at most `shard_bytes`, and their index."""
    shards = _split(tensors, np.dtype(_TYPES[dtype]).itemsize, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard, dict.fromkeys(shard, dtype))
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_safetensors(path: Path, tensors: Shapes, dtypes: Mapping[str, str]) -> None:
    """Write one file. Integers are all one."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + math.prod(shape) * np.dtype(_TYPES[dtypes[name]]).itemsize
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    drawn = np.random.default_rng(0).standard_normal(_NUMBERS, np.float32) * np.float32(STD)
    pools = {dtype: drawn.astype(_TYPES[dtype]) for dtype in set(dtypes.values())}
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in tensors.items():
            pool = pools[dtypes[name]]
            for part in _parts(pool if len(shape) > 1 else np.ones_like(pool), math.prod(shape)):
                file.write(part.tobytes())


def _parts(pool: NDArray[Any], count: int) -> Iterator[NDArray[Any]]:
    for begin in range(0, count, len(pool)):
        yield pool[: count - begin]


def _split(tensors: Shapes, item_bytes: int, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in tensors.items():
        size = math.prod(shape) * item_bytes
        if shards[-1] and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += size
    return shards
