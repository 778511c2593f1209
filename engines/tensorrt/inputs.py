"""Valid integer inputs for tools that would invent them: tokens of the vocabulary, rows that exist.

trtexec fills integers with numbers from -128 on. With them a graph reads outside of its buffers, or a call is timed
that never happens. Other inputs may have any values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft import names
from redraft.engines.drafters import drafter_of, measured_graphs
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.engines.tensorrt.records import Profile
from redraft.names import TensorSpec

_WHOLE = ("bool", "int64", "int32")
Integers = NDArray[Any]


def input_file(graph: str, profile: str, name: str) -> str:
    """Return the file of an input of a profile's usual call. It has the bytes alone, as trtexec reads them."""
    return f"{graph}.{profile}.{name}.bin"


def made_inputs(record: GraphRecord) -> tuple[TensorSpec, ...]:
    """Return the inputs of a graph that are written: those that are not floats."""
    return tuple(spec for spec in record.inputs if spec.dtype in _WHOLE)


def write_inputs(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Write the inputs of every engine's usual calls into `folder`; yields the files as they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    for graph, engine in (manifest.tensorrt.engines if manifest.tensorrt else {}).items():
        if graph not in measured_graphs(manifest):
            continue
        for profile in engine.profiles:
            for name, values in sound_inputs(graph, manifest, profile).items():
                path = folder / input_file(graph, profile.name, name)
                path.write_bytes(values.tobytes())
                yield path


def own_integers(graph: str, manifest: Manifest) -> Mapping[str, tuple[int, int]]:
    """Return least and largest valid values of the inputs that only a drafter's method has."""
    drafter = drafter_of(manifest, graph)
    spec = drafter.engine_graphs.get(graph) if drafter else None
    return spec.integers(drafter.shape) if drafter and spec else {}


def sound_inputs(graph: str, manifest: Manifest, profile: Profile) -> dict[str, Integers]:
    """Return the integers of the call that a profile is tuned for: a chain after as many rows as fit before it."""
    record, own = manifest.all_graphs[graph], own_integers(graph, manifest)
    sizes = _sizes(record, profile)
    rows = sizes.get("T", sizes.get("M", 1))
    cache_len = min(sizes.get("C", rows) // 2, manifest.max_model_len - rows)
    vocabulary, cache_len = manifest.shape.vocabulary, max(cache_len, 0)
    return {spec.name: _values(spec, sizes, cache_len, rows, vocabulary, own) for spec in made_inputs(record)}


def _sizes(record: GraphRecord, profile: Profile) -> dict[str, int]:
    """Return the sizes of the symbols that a profile is tuned for."""
    known = {spec.name: spec for spec in record.inputs}
    return {
        dim: size
        for name, sizes in profile.inputs.items()
        for dim, size in zip(known[name].shape, sizes.opt, strict=True)
        if isinstance(dim, str)
    }


def _values(
    spec: TensorSpec, sizes: Mapping[str, int], cache_len: int, rows: int, vocabulary: int,
    own: Mapping[str, tuple[int, int]],
) -> Integers:  # fmt: skip
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    random = np.random.default_rng(0)
    made: Mapping[str, Any] = {
        names.TOKEN_IDS: random.integers(0, vocabulary, shape),
        names.TOKENS: random.integers(0, vocabulary, shape),
        names.POSITIONS: cache_len + np.arange(rows),
        names.TREE_MASK: np.tri(rows, dtype=bool),
        names.CACHE_LEN: cache_len,
        names.KV_LEN: cache_len + rows,
        names.OUTPUT_ROWS: np.arange(rows - shape[-1], rows),
        names.NUM_PENDING: rows,
        **{name: low + np.arange(shape[-1]) % (high - low + 1) for name, (low, high) in own.items()},
    }
    return np.broadcast_to(made[spec.name], shape).astype(spec.dtype)
