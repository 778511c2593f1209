"""The host as a device: buffers are arrays, and a call returns after its work."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.compaction import Compact, CompactProgram, can_compact
from redraft.engines.device import Buffer, Program, Run, copied_bytes
from redraft.engines.host_buffer import ArrayInputs, ArrayOutputs, HostBuffer, array_of
from redraft.engines.host_memory import graph_bytes
from redraft.engines.host_programs import host_program
from redraft.names import Dtype

MOST_COPIED_BYTES = 64 << 20
"""Weights that an engine for chains and one for trees may both hold. Each engine rearranges weights for its kernels, so
they cannot share them. With more, the engine for trees does both: it is up to 5 % slower for chains, in small models.
"""
BLOCK_ROWS = 128
"""Rows that the CPU's products sum at a time, or a multiple of that (`redraft.engines.lowering.order`)."""


class HostDevice:
    """A `redraft.engines.device.Device` that runs graphs lowered to CPU kernels.

    max_num_seqs, exact: these choose the verifier's graph (`Bundle.host_graph`).   verifier_graph: another one.
    step_graphs:  run the step's graphs like a GPU; otherwise NumPy functions replace them.
    kernels:      redraft's kernels built for the CPU, for tests; None uses only graphs.
    """

    asynchronous = False

    def __init__(
        self, bundle: Bundle, threads: int | None = None, kernels: Compact | None = None, *, step_graphs: bool = True,
        max_num_seqs: int | None = None, exact: bool = True, verifier_graph: str = "",
    ) -> None:  # fmt: skip
        self.name = "cpu" if step_graphs else "host"
        self.step_graphs = step_graphs
        self.bundle = bundle
        self._threads = threads
        self._kernels = kernels
        self._single = max_num_seqs == 1
        chains = self._single and not (exact and bundle.manifest.drafters and not self.copies_weights)
        self.verifier_graph = verifier_graph or bundle.host_graph(chains, exact)
        exact_graphs = (names.VERIFIER_BATCH, names.VERIFIER_SINGLE)
        self.block_rows = BLOCK_ROWS if self.verifier_graph in exact_graphs else None

    @property
    def copies_weights(self) -> bool:
        """True if an engine for chains and one for trees may be open together."""
        if names.VERIFIER_BATCH not in self.bundle.manifest.graphs:
            return True
        return graph_bytes(self.bundle, names.VERIFIER_BATCH) <= MOST_COPIED_BYTES

    def empty(self, dtype: Dtype, *shape: int) -> HostBuffer:
        """Return a buffer of zeros."""
        return HostBuffer.zeros(dtype, *shape)

    def host_inputs(self, **shapes: tuple[int, ...]) -> ArrayInputs:
        """Return host inputs of int64 fields of these shapes."""
        return ArrayInputs({name: self.empty("int64", *shape) for name, shape in shapes.items()})

    def host_outputs(self, buffer: Buffer) -> ArrayOutputs:
        """Return host outputs of all of `buffer`."""
        return ArrayOutputs(array_of(buffer))

    def expect(self, parts: Mapping[str, int], graphs: Sequence[str] = ()) -> None:
        """Accept everything: the host's free memory is unknown, since memory may be swapped."""

    def copy(self, target: Buffer, source: Buffer) -> Run:
        """Return a run that copies `source` to `target`. Raises ValueError if their sizes differ."""
        size = copied_bytes(target, source)

        def run() -> None:
            ctypes.memmove(target.address, source.address, size)

        return run

    def program(self, graph: str, short: bool = False) -> Program:
        """Load a graph of the bundle, or the NumPy function that replaces it. Raises BundleError."""
        from redraft.engines.onnxruntime_device import load_program

        record = self.bundle.graph(graph)
        if not self.step_graphs and (program := host_program(graph, record)):
            return program
        if graph == names.STEP_COMPACT_KV and self._kernels is not None and can_compact(record):
            return CompactProgram(record, self, self._kernels)
        if graph == names.VERIFIER:
            graph = self.verifier_graph
        else:
            lowered = ([names.single(graph)] if self._single else []) + [names.batch(graph)]
            graph = next((name for name in lowered if name in self.bundle.manifest.all_graphs), graph)
        return load_program(self.bundle, graph, 1 if short else self._threads)

    def chain(self, runs: Sequence[Run]) -> InOrder:
        """Return work that runs all of `runs`, one after the other."""
        return InOrder(tuple(runs))

    def wait(self) -> None:
        """Return at once: all work is finished."""

    def close(self) -> None:
        """Do nothing: the device stores no programs."""


class InOrder:
    """Runs in order; a `redraft.engines.device.Work`."""

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self._runs = runs
        self._seconds = 0.0

    def __call__(self) -> None:
        started = time.perf_counter()
        for run in self._runs:
            run()
        self._seconds = time.perf_counter() - started

    def seconds(self) -> float:
        """Return the time of the latest run; 0 before the first run."""
        return self._seconds
