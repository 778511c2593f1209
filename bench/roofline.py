"""How near an engine's calls come to the speed of the memory: bytes that a call must move, over the time it takes.

Decoding reads every weight for a few tokens, so the time of a call has a floor: its bytes over the bandwidth. Where a
call stands near that floor, more tokens a call cost little; far above it, something else takes the time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from redraft import names
from redraft.bench.environment import usable_threads
from redraft.bench.timing import SETTLE_SECONDS
from redraft.engines import Bundle, open_bundle, open_engine
from redraft.names import TensorSpec
from redraft.runtime.drafters.base import OpenEngine
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.host_verifier import HostVerifier

TREE_NODES = 8
"""Nodes of the tree beside the single token, root included."""
CATCH_UP_ROWS = 2
"""Rows that a draft brings in: about what a step accepts."""
LIVE_ROWS = 200
"""Rows of the KV buffers that are live before the call."""
STREAMED_BYTES = 256 << 20
"""Size of the arrays that the bandwidth is measured on, several times what caches hold."""
HEADER = ("graph", "tokens", "weights MB", "KV MB", "other MB", "least ms", "GB/s", "of bandwidth")
_BLOCKS, _RUNS = 6, 16
_ROWS_ONLY = {("Gather", 0), ("RotaryEmbedding", 1), ("RotaryEmbedding", 2), ("GroupQueryAttention", 7),
              ("GroupQueryAttention", 8)}  # fmt: skip
"""Operators and the inputs of which they read as many rows as there are tokens."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one call must move.

    weights:  read, token information included.   kv_read, kv_written: rows of the KV buffers.
    inputs, outputs: everything else that crosses the graph's boundary: tokens, mask, logits, features, trees.
    """

    weights: int
    kv_read: int
    kv_written: int
    inputs: int
    outputs: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv_read + self.kv_written + self.inputs + self.outputs


def traffic(bundle: Bundle, graph: str, tokens: int, live: int) -> Traffic:
    """What a call of one sequence with `tokens` tokens (or rows to catch up on) after `live` rows must move.

    Each byte counts once, as if caches held it until the call ends: a weight that several products share, the weights
    of a drafter's layer over the steps of its chain, a live KV row. What layers hand to each other does not count. So
    this is the least that any implementation moves between memory and processor, if it begins with cold caches.

    - weights: every initializer; where it is a table that is looked up, as many rows as there are tokens;
    - token information: a row for the root and `width` rows for each later level of the tree, or, of the low-rank form,
      as many rows of the left factor and all of the right one; the index of hot tokens whole;
    - KV: `live` rows of every buffer read; a row for every token written, and in a chain one for each further step;
    - inputs and outputs: as the signature says, R = T.
    """
    record = bundle.graph(graph)
    sizes = {"B": 1, "T": tokens, "R": tokens, "M": tokens}
    chained = bundle.manifest.lyanna.steps - 1 if bundle.manifest.lyanna and graph.startswith(names.LYANNA_DRAFT) else 0
    caches = [spec for spec in record.inputs if spec.name.startswith("kv.")]
    tables = [spec for spec in record.inputs if spec.name.startswith(names.TOKEN_INFO)]
    others = [spec for spec in record.inputs if spec not in caches and spec not in tables]
    kv_row = sum(_bytes(spec, {"B": 1, "C": 1}) for spec in caches)
    return Traffic(
        weights=_initializers(bundle.path / record.file, tokens) + _token_info(bundle, graph, tables),
        kv_read=live * kv_row,
        kv_written=(tokens + chained) * kv_row,
        inputs=sum(_bytes(spec, sizes) for spec in others),
        outputs=sum(_bytes(spec, sizes) for spec in record.outputs if spec.in_place_of is None),
    )


def _bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape) * np.dtype(spec.dtype).itemsize


def _initializers(graph: Path, tokens: int) -> int:
    """Bytes of a graph's weights that a call reads; their values are not loaded."""
    model = onnx.load(str(graph), load_external_data=False)
    uses: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            uses[name].add((node.op_type, place))
    total = 0
    for tensor in model.graph.initializer:
        size, rows = _size(tensor), tensor.dims[0] if tensor.dims else 1
        looked_up = size * min(tokens, rows) // rows if uses[tensor.name] & _ROWS_ONLY else 0
        total += looked_up + (size if uses[tensor.name] - _ROWS_ONLY else 0)
    return total


def _size(tensor: onnx.TensorProto) -> int:
    lengths = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return lengths[0] if lengths else int(onnx.numpy_helper.to_array(tensor).nbytes)


def _token_info(bundle: Bundle, graph: str, tables: list[TensorSpec]) -> int:
    """Bytes of token information that a tree of all steps looks up."""
    shape = bundle.manifest.lyanna
    if shape is None or not tables:
        return 0
    levels = shape.steps - (graph == names.LYANNA_RESAMPLE)
    looked_up = 1 + (levels - 1) * shape.width
    whole = (f"{names.TOKEN_INFO}right", f"{names.TOKEN_INFO}index")
    return sum(
        _bytes(spec, {}) if spec.name in whole else _bytes(spec, {}) * looked_up // int(spec.shape[0])
        for spec in tables
    )


@dataclass(frozen=True)
class Measured:
    """One kind of call: what it must move, the least time it took, and the speed that this comes to."""

    graph: str
    tokens: int
    traffic: Traffic
    ms: float
    gigabytes_per_second: float
    share_of_bandwidth: float


@dataclass(frozen=True)
class Roofline:
    """The engines of a bundle against the memory. Bandwidths in GB/s: of reading, and of copying, which counts both
    directions; `share_of_bandwidth` is of the larger one.
    """

    threads: int
    live_rows: int
    read: float
    copy: float
    engines: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**asdict(self), "engines": [asdict(found) for found in self.engines]}


def measure(path: Path, threads: int | None = None, nodes: int = TREE_NODES, live: int = LIVE_ROWS) -> Roofline:
    """Time every engine that one sequence uses, the portable verifier and the memory, in turn: the least of each.

    Raises BundleError.
    """
    bundle, count = open_bundle(path, verify=False), threads or usable_threads()
    live = min(live, bundle.manifest.context - nodes)
    calls = {(graph, tokens): call for graph, tokens, call in _calls(bundle, count, nodes, live)}
    stream = Stream(count)
    least = dict.fromkeys(calls, math.inf)
    for _ in range(_BLOCKS):
        for key, call in calls.items():
            time.sleep(SETTLE_SECONDS)
            least[key] = min(least[key], *[call() for _ in range(_RUNS)])
        stream.run()
    engines = (_measured(bundle, *key, live, ms, stream.best) for key, ms in least.items())
    return Roofline(count, live, stream.read, stream.copy, tuple(engines))


def _measured(bundle: Bundle, graph: str, tokens: int, live: int, ms: float, bandwidth: float) -> Measured:
    moved = traffic(bundle, graph, tokens, live)
    speed = moved.total / ms / 1e6
    return Measured(graph, tokens, moved, ms, speed, speed / bandwidth)


def _calls(bundle: Bundle, threads: int, nodes: int, live: int) -> Iterator[tuple[str, int, Callable[[], float]]]:
    """Graph, tokens and a function that runs such a call and returns its milliseconds."""
    manifest = bundle.manifest
    for graph in (names.VERIFIER, names.VERIFIER_SINGLE):
        if graph in manifest.graphs:
            engine = open_engine(bundle, graph, threads)
            verifier = HostVerifier(engine, manifest.shape, manifest.context, 1, manifest.taps)
            for tokens in (1, nodes):
                yield graph, tokens, partial(verifier.measure_ms, 1, tokens, live)
    if manifest.lyanna is None:
        return
    drafter = LyannaDrafter.create(verifier, {}, OpenEngine(bundle, threads))
    single = names.LYANNA_DRAFT_SINGLE in manifest.graphs
    draft = names.LYANNA_DRAFT_SINGLE if single else names.LYANNA_DRAFT
    yield draft, CATCH_UP_ROWS, lambda: drafter.measure_ms(CATCH_UP_ROWS, live)[0]
    if manifest.lyanna.steps > 1:
        yield names.LYANNA_RESAMPLE, 1, lambda: drafter.measure_ms(CATCH_UP_ROWS, live)[1]


class Stream:
    """Reads and copies `size` bytes, more than caches hold, on all threads. `read`, `copy`: best so far, GB/s."""

    def __init__(self, threads: int, size: int = STREAMED_BYTES) -> None:
        self.read = self.copy = 0.0
        self._parts = [np.ones(size // threads // 4, np.float32) for _ in range(threads)]
        self._copies = [np.zeros_like(part) for part in self._parts]
        self._pool = ThreadPoolExecutor(threads)

    @property
    def best(self) -> float:
        """The larger of the two."""
        return max(self.read, self.copy)

    def run(self) -> None:
        """Once over everything, in both ways. A copy moves each byte twice."""
        moved = sum(part.nbytes for part in self._parts)
        read = _seconds(lambda: list(self._pool.map(np.maximum.reduce, self._parts)))
        copied = _seconds(lambda: list(self._pool.map(np.copyto, self._copies, self._parts)))
        self.read, self.copy = max(self.read, moved / read / 1e9), max(self.copy, 2 * moved / copied / 1e9)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def table(found: Roofline) -> list[tuple[str, ...]]:
    """Rows of text, the header first."""
    return [HEADER, *(_row(engine) for engine in found.engines)]


def _row(found: Measured) -> tuple[str, ...]:
    moved = found.traffic
    parts = (moved.weights, moved.kv_read + moved.kv_written, moved.inputs + moved.outputs)
    megabytes = (f"{part / 1e6:.2f}" for part in parts)
    speed = (f"{found.ms:.3f}", f"{found.gigabytes_per_second:.1f}", f"{found.share_of_bandwidth:.0%}")
    return (found.graph, str(found.tokens), *megabytes, *speed)
