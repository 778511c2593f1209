"""Integer inputs that are sound together, for tools that would make them up: tokens of the vocabulary, rows that exist.

trtexec fills integers with numbers from -128 on, with which a graph reads outside of its buffers, or times calls that
nobody makes. Of other inputs any values will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft import names
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt.records import Profile
from redraft.names import TensorSpec

GRAPHS = (names.VERIFIER, names.LYANNA_DRAFT, names.LYANNA_RESAMPLE)
"""Graphs that other tools are given commands for."""
_WHOLE = ("bool", "int64", "int32")
Integers = NDArray[Any]


def input_file(graph: str, profile: str, name: str) -> str:
    """Where an input of a profile's usual call is written: its bytes alone, as trtexec reads them."""
    return f"{graph}.{profile}.{name}.bin"


def made_inputs(record: GraphRecord) -> tuple[TensorSpec, ...]:
    """The inputs of a graph that are written: those that are no floats."""
    return tuple(spec for spec in record.inputs if spec.dtype in _WHOLE)


def write_inputs(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Write the inputs of every engine's usual calls into `folder`; yields the files as they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    for graph, engine in (manifest.tensorrt.engines if manifest.tensorrt else {}).items():
        if graph not in GRAPHS:
            continue
        for profile in engine.profiles:
            for name, values in sound_inputs(manifest.graphs[graph], manifest, profile).items():
                path = folder / input_file(graph, profile.name, name)
                path.write_bytes(values.tobytes())
                yield path


def sound_inputs(record: GraphRecord, manifest: Manifest, profile: Profile) -> dict[str, Integers]:
    """The integers of the call that a profile is tuned for: a chain behind as many rows as leave it room."""
    sizes = _sizes(record, profile)
    rows = sizes.get("T", sizes.get("M", 1))
    cache_len = min(sizes.get("C", rows) // 2, manifest.max_model_len - rows)
    return {spec.name: _values(spec, sizes, max(cache_len, 0), rows, manifest) for spec in made_inputs(record)}


def _sizes(record: GraphRecord, profile: Profile) -> dict[str, int]:
    """The symbols of what a profile is tuned for."""
    known = {spec.name: spec for spec in record.inputs}
    return {
        dim: size
        for name, sizes in profile.inputs.items()
        for dim, size in zip(known[name].shape, sizes.opt, strict=True)
        if isinstance(dim, str)
    }


def _values(spec: TensorSpec, sizes: Mapping[str, int], cache_len: int, rows: int, manifest: Manifest) -> Integers:
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    random = np.random.default_rng(0)
    hot = manifest.lyanna.hot if manifest.lyanna else 0
    made: Mapping[str, Any] = {
        names.TOKEN_IDS: random.integers(0, manifest.shape.vocabulary, shape),
        names.TOKENS: random.integers(0, manifest.shape.vocabulary, shape),
        names.POSITIONS: cache_len + np.arange(rows),
        names.TREE_MASK: np.tri(rows, dtype=bool),
        names.CACHE_LEN: cache_len,
        names.KV_LEN: cache_len + rows,
        names.OUTPUT_ROWS: np.arange(rows - shape[-1], rows),
        names.NUM_PENDING: rows,
        names.FIRST_STEP: 1,
        f"{names.TOKEN_INFO}index": np.arange(int(np.prod(shape))) % (hot + 1),
    }
    return np.broadcast_to(made[spec.name], shape).astype(spec.dtype)
