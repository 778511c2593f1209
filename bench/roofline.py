"""Engines against the speed of the memory: bytes that a call must move, over the time it takes.

Decoding reads every weight for a few tokens, so the time of a call has a floor: its bytes over the bandwidth. If a call
is near that floor, more tokens a call cost little. If it is far above, something else takes the time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from redraft import names
from redraft.bench.environment import SETTLE_SECONDS, usable_threads
from redraft.engines import Bundle, open_bundle
from redraft.engines.device import Device, byte_size
from redraft.engines.drafters import drafter_of, read_drafters
from redraft.engines.host_device import HostDevice
from redraft.errors import BackendError
from redraft.names import TensorSpec
from redraft.runtime import Runtime
from redraft.runtime.drafters import load_drafter
from redraft.runtime.drafters.engine import EngineDrafter
from redraft.runtime.steps.verifier import Verifier, open_verifier

TREE_NODES = 8
"""Nodes of the timed tree, root included; the other timed call has a single token."""
CATCH_UP_ROWS = 2
"""Rows that a draft brings in: about as many as a step accepts."""
KV_ROWS = 200
"""Rows in the KV buffers before the call."""
STREAMED_BYTES = 256 << 20
"""Size of the arrays that the bandwidth is measured on, several times the size of caches."""
LEAST_STREAMED_BYTES = 1 << 20
"""Bandwidth is not measured on a device with no more free memory than this for each end of a copy."""
COPIES = 8
"""Copies within a device between two waits for their end; they take far longer than a wait."""
HEADER = ("graph", "tokens", "weights MB", "KV MB", "other MB", "least ms", "GB/s", "of bandwidth")
HOST_VERIFIERS = (names.VERIFIER, names.VERIFIER_BATCH, names.VERIFIER_SINGLE)
"""Forms of the verifier that the host's table compares; the one that runs is the last."""
Calls = dict[tuple[str, int], Callable[[], float]]
"""By graph and tokens, a function that runs such a call and returns its milliseconds."""
_BLOCKS, _RUNS = 6, 16
_ROWS_ONLY = {("Gather", 0), ("RotaryEmbedding", 1), ("RotaryEmbedding", 2), ("GroupQueryAttention", 7),
              ("GroupQueryAttention", 8), (names.CPU_TREE_ATTENTION, 11), (names.CPU_TREE_ATTENTION, 12)}  # fmt: skip
"""Operators and those of their inputs that they read only for as many rows as there are tokens."""


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
        """The sum of all fields."""
        return self.weights + self.kv_read + self.kv_written + self.inputs + self.outputs


def traffic(bundle: Bundle, graph: str, tokens: int, kv_len: int) -> Traffic:
    """Return bytes that one sequence's call moves, with `tokens` tokens (or rows to catch up on) after `kv_len` rows.

    Each byte counts once, as if caches held it until the call ends. Examples are a weight that several products share,
    the weights of a drafter's layer over the steps of its chain, and a used KV row. Values passed between layers do not
    count. So this is the least that any implementation moves between memory and processor, if caches begin cold.

    - weights: every initializer; if it is a lookup table, as many rows as there are tokens;
    - tables of a drafter: the rows that the method says a call looks up, other tables whole;
    - KV: `kv_len` rows of every buffer read; a row for every token written, and in a chain one for each further step;
    - inputs and outputs: as the signature says, R = T.
    """
    record = bundle.graph(graph)
    sizes = {"B": 1, "T": tokens, "N": tokens, "R": tokens, "M": tokens}
    further, tables = 0, set[str]()
    table_rows: Mapping[str, int] = {}
    if drafter := drafter_of(bundle.manifest, graph):
        role, _, _ = graph.removeprefix(f"{drafter.id}.").partition(".")
        spec = drafter.method.graphs[role]
        further = spec.chain_steps(drafter.shape) - 1 if spec.chain_steps else 0
        table_rows = spec.looked_up(drafter.shape)
        tables = {table.name for table in drafter.method.tables(drafter.shape)}
    weights, inputs, kv_row = _initializers(bundle.path / record.file, tokens), 0, 0
    for tensor in record.inputs:
        if names.is_cache(tensor.name):
            kv_row += _bytes(tensor, {"B": 1, "C": 1})
        elif tensor.name in tables:
            rows = int(tensor.shape[0])
            weights += _bytes(tensor, {}) * table_rows.get(tensor.name, rows) // rows
        else:
            inputs += _bytes(tensor, sizes)
    outputs = sum(_bytes(tensor, sizes) for tensor in record.outputs if tensor.in_place_of is None)
    return Traffic(weights, kv_len * kv_row, (tokens + further) * kv_row, inputs, outputs)


def _bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    return byte_size(spec.dtype, [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape])


def _initializers(graph: Path, tokens: int) -> int:
    """Return the bytes of a graph's weights that a call reads; their values are not loaded."""
    model = onnx.load(str(graph), load_external_data=False)
    uses: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            uses[name].add((node.op_type, place))
    total = 0
    for tensor in model.graph.initializer:
        lengths = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
        size = lengths[0] if lengths else int(onnx.numpy_helper.to_array(tensor).nbytes)
        rows = tensor.dims[0] if tensor.dims else 1
        total += size * min(tokens, rows) // rows if uses[tensor.name] & _ROWS_ONLY else 0
        total += size if uses[tensor.name] - _ROWS_ONLY else 0
    return total


@dataclass(frozen=True)
class EngineSpeed:
    """One kind of call: the bytes it must move, its least time, and the resulting speed."""

    graph: str
    tokens: int
    traffic: Traffic
    ms: float
    gigabytes_per_second: float
    share_of_bandwidth: float


@dataclass(frozen=True)
class Roofline:
    """The engines of a bundle against the memory of `device`; it is `host` for the CPU's engines over arrays.

    `read` and `copy` are bandwidths in GB/s over `streamed_bytes`. Reading is None on a device, which only copies.
    Copying counts both directions. `share_of_bandwidth` is of the larger one. `threads` is None on CUDA.
    """

    device: str
    threads: int | None
    kv_len: int
    read: float | None
    copy: float
    streamed_bytes: int
    engines: tuple[EngineSpeed, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def measure(
    path: Path, threads: int | None = None, nodes: int = TREE_NODES, kv_len: int = KV_ROWS, device: str | None = None
) -> Roofline:
    """Time every engine that one sequence uses, the portable verifier and the memory, in turn: the least of each.

    device: a value for `Runtime.open`. A verifier's time on a device includes tree preparation, engine and acceptance,
    until the host has `accept_output`. A draft's time includes taking in the pending features.
    Raises BundleError, BackendError, and UsageError for an unknown device.
    """
    bundle, count = open_bundle(path, verify=False), threads or usable_threads()
    kv_len = min(kv_len, bundle.manifest.max_model_len - nodes)
    if device is None and bundle.manifest.tensorrt is None:
        host = partial(HostDevice, bundle, count, step_graphs=False, max_num_seqs=1)
        verifiers = {
            graph: open_verifier(bundle, host(verifier_graph=graph))
            for graph in dict.fromkeys((*HOST_VERIFIERS, host().verifier_graph))
            if graph in bundle.manifest.graphs
        }
        calls = _calls(bundle, verifiers, (1, nodes), kv_len)
        return _timed(bundle, "host", count, kv_len, calls, HostStream(count))
    with Runtime.open(path, threads, verify=False, device=device) as runtime:
        verifier = runtime.verifier
        calls = _calls(bundle, {names.VERIFIER: verifier}, (1, min(nodes, verifier.largest_tree)), kv_len)
        name = verifier.device.name
        return _timed(bundle, name, None if name == "cuda" else count, kv_len, calls, DeviceStream(verifier.device))


def _timed(
    bundle: Bundle, device: str, threads: int | None, kv_len: int, calls: Calls, memory: HostStream | DeviceStream
) -> Roofline:  # fmt: skip
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(_BLOCKS):
        for key, call in calls.items():
            time.sleep(SETTLE_SECONDS)
            least[key] = min(least[key], *[call() for _ in range(_RUNS)])
        memory.run()
    engines, bandwidth = [], max(memory.read or 0.0, memory.copy)
    for (graph, tokens), ms in least.items():
        moved = traffic(bundle, graph, tokens, kv_len)
        speed = moved.total / ms / 1e6
        engines.append(EngineSpeed(graph, tokens, moved, ms, speed, speed / bandwidth))
    return Roofline(device, threads, kv_len, memory.read, memory.copy, memory.size, tuple(engines))


def _calls(bundle: Bundle, verifiers: Mapping[str, Verifier], sizes: Sequence[int], kv_len: int) -> Calls:
    """Return the calls of all verifiers and, over the last of them, of all drafters."""
    calls: Calls = {}
    for graph, verifier in verifiers.items():
        calls |= {(graph, tokens): partial(verifier.measure_ms, 1, tokens, kv_len) for tokens in sizes}
    for drafter in read_drafters(bundle.manifest):
        loaded = load_drafter(drafter.id, verifier, {}, bundle)
        assert isinstance(loaded, EngineDrafter)
        draft = verifier.device.form(drafter.graph(names.DRAFT))
        calls[draft, CATCH_UP_ROWS] = partial(_draft_ms, loaded, kv_len, 0)
        if names.RESAMPLE in drafter.record.graphs:
            calls[drafter.graph(names.RESAMPLE), 1] = partial(_draft_ms, loaded, kv_len, 1)
    return calls


def _draft_ms(loaded: EngineDrafter, kv_len: int, part: int) -> float:
    """Return the time of drafting (part 0) or of resampling."""
    return loaded.measure_ms(CATCH_UP_ROWS, kv_len)[part]


class HostStream:
    """Host memory: reads and copies `size` bytes, more than caches hold, on all threads.

    read, copy: the best bandwidth so far, GB/s. A copy moves each byte twice.
    """

    def __init__(self, threads: int, size: int = STREAMED_BYTES) -> None:
        self.read, self.copy, self.size = 0.0, 0.0, size
        self._parts = [np.ones(size // threads // 4, np.float32) for _ in range(threads)]
        self._copies = [np.zeros_like(part) for part in self._parts]
        self._pool = ThreadPoolExecutor(threads)

    def run(self) -> None:
        """Measure reading and copying once."""
        moved = sum(part.nbytes for part in self._parts)
        read = _seconds(lambda: list(self._pool.map(np.maximum.reduce, self._parts)))
        copied = _seconds(lambda: list(self._pool.map(np.copyto, self._copies, self._parts)))
        self.read, self.copy = max(self.read, moved / read / 1e9), max(self.copy, 2 * moved / copied / 1e9)


class DeviceStream:
    """Device memory, by the device's own copy: the largest half, quarter … of `size` that is free. Raises BackendError.

    read, copy: as of HostStream; a device does not read.
    """

    def __init__(self, device: Device, size: int = STREAMED_BYTES) -> None:
        self.read, self.copy = None, 0.0
        while True:
            try:
                device.expect({"both ends of a copy": 2 * size, "later buffers": 2 * size})
                self.target, source = device.empty("uint8", size), device.empty("uint8", size)
                break
            except BackendError:
                if size // 2 < LEAST_STREAMED_BYTES:
                    raise
                size //= 2
        self.size = source.shape[0]
        source.write(np.ones(self.size, np.uint8))  # unwritten host pages share one page, which caches hold
        self._copy = device.copy(self.target, source)
        self._device = device

    def run(self) -> None:
        """Measure copying once."""

        def copies() -> None:
            for _ in range(COPIES):
                self._copy()
            self._device.wait()

        self._device.wait()
        self.copy = max(self.copy, 2 * COPIES * self.size / _seconds(copies) / 1e9)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def table(roofline: Roofline) -> list[tuple[str, ...]]:
    """Return rows of text, the header first."""
    rows: list[tuple[str, ...]] = [HEADER]
    for one in roofline.engines:
        moved = one.traffic
        parts = (moved.weights, moved.kv_read + moved.kv_written, moved.inputs + moved.outputs)
        speed = (f"{one.ms:.3f}", f"{one.gigabytes_per_second:.1f}", f"{one.share_of_bandwidth:.0%}")
        rows.append((one.graph, str(one.tokens), *(f"{part / 1e6:.2f}" for part in parts), *speed))
    return rows
