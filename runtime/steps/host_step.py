"""Steps on the host: the host fills arrays, calls the engine, and does all other parts in NumPy.

Calls have no padding, since eight rows take a sixth longer than six. The rows of all trees follow each other, and only
the attention of a packed graph pads them (`redraft.signatures.packed_inputs`). Arrays of each set of sizes are reused,
and so are masks of each tree shape.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.calls import Call, Calls, aligned
from redraft.engines.device import Array, Buffer, Device, numpy_type, sized
from redraft.engines.host_device import HostBuffer, HostDevice, aligned_zeros, array_of
from redraft.engines.host_memory import LARGE_PAGE_BYTES, give_back, use_small_pages
from redraft.lru import LruCache
from redraft.names import TensorSpec
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.interface import ChunkRows, Limits, Pending, Steps
from redraft.runtime.trees.tree import Layout, is_chain, layout
from redraft.signatures import VerifierShape
from redraft.types import BoolArray, FloatArray, IntArray, Outcome, Tree

MOST_STEPS = 256
"""Most sizes of calls over trees that are stored. Their logits and hidden states share memory."""
MOST_WITH_CHUNKS = 32
"""Most sizes of calls over trees and chunks that are stored. A mask of 128 rows in 64 slots has 1 MB."""
MOST_PREFILLS = 64
"""Most slots whose call for a prompt chunk of one width is stored, at a few addresses each."""
MOST_WIDTHS = 8
"""Most widths of prompt chunks that are stored. Each has a row of logits."""


class HostSteps(Steps):
    """Steps of the host.

    An engine without a mask accepts chains only. Trees that branch then need another engine over the same KV buffers,
    which `take_branches` opens, in addition or in place of the first.
    """

    def __init__(self, device: Device, shape: VerifierShape, hidden_states: tuple[str, ...], limits: Limits) -> None:
        super().__init__(MOST_STEPS, MOST_WIDTHS)
        self._with_chunks: LruCache[Any, HostStep] = LruCache(MOST_WITH_CHUNKS)
        self.hidden_states = hidden_states
        self._device = device
        self._layers = shape.layers
        rows = (limits.slots, shape.kv_heads, limits.max_model_len, shape.head_dim)
        # [2 layers (key, value, key, …), slots, H_kv, C, D]: one array, so that one copy moves a row of all layers.
        # It begins with a large page: a head's first rows would else take two of them.
        self.kv: Array = aligned_zeros((2 * shape.layers, *rows), numpy_type(shape.kv_dtype), LARGE_PAGE_BYTES)
        for layer in self.kv:  # with several slots, a large page for each head would take seconds and gigabytes
            use_small_pages(layer[1:] if limits.max_num_seqs == 1 else layer)
        first_rows = self.kv[:, 0, :, 0]
        # The first rows of a slot take memory, large page by large page, while another core loads the engine.
        touching = threading.Thread(target=first_rows.fill, args=(0,))
        touching.start()
        self._engine = self._opened(names.VERIFIER)
        touching.join()
        self._outputs: dict[str, FloatArray] = {}
        self._tree_engine = self._engine if _takes_trees(self._engine) else None
        self.branches = self._tree_engine is not None
        self.prefers_chains = not self.branches
        self.packed = _is_packed(self._engine)
        self.takes_chunks = self.packed and device.own_attention

    def forget(self) -> None:
        super().forget()
        self._with_chunks.clear()

    def _opened(self, graph: str) -> Calls:
        engine = Calls(self._device.program(graph))
        for layer in range(self._layers):
            engine.bind(names.key_cache(layer), self.kv[2 * layer])
            engine.bind(names.value_cache(layer), self.kv[2 * layer + 1])
        return engine

    def take_branches(self) -> None:
        """Open the engine for trees that branch. Raises BackendError if memory does not allow it."""
        one = isinstance(self._device, HostDevice) and not self._device.copies_weights
        if self._tree_engine is None and not one:
            self._tree_engine = self._opened(names.VERIFIER_BATCH)
        elif self._tree_engine is None:
            self.forget()
            del self._engine  # before the other loads, so that weights are in memory once
            try:
                self._engine = self._tree_engine = self._opened(names.VERIFIER_BATCH)
            except BaseException:
                self._engine = self._opened(names.VERIFIER)
                raise
        self.branches = True

    def move(self, source: int, target: int, rows: int) -> None:
        self.kv[:, target, :, :rows] = self.kv[:, source, :, :rows]

    def release(self, slot: int) -> None:
        for rows in self.kv[:, slot]:
            give_back(rows)

    def host_kv(self) -> list[Array]:
        return list(self.kv)

    def tree(
        self, trees: Sequence[Tree], cache_len: Sequence[int], chunks: Sequence[ChunkRows] = ()
    ) -> HostStep:  # fmt: skip
        least = -(-self.fewest_rows // len(trees))
        rows = [max(len(tree), least) for tree in trees]
        width = max(rows)
        branched = self._tree_engine is not self._engine and not all(map(is_chain, trees))
        engine = self._tree_engine if branched else self._engine
        assert engine is not None, "trees that branch need take_branches first"
        if not _is_packed(engine):
            rows = [width] * len(rows)
        sequences = max([len(trees), *[chunk.slot + 1 for chunk in chunks]])
        width = max([width, *[len(chunk.tokens) for chunk in chunks]])
        in_all = sum(rows) + sum([len(chunk.tokens) for chunk in chunks])
        key = (sequences, in_all, width, sum(rows), branched)
        stored = self._with_chunks if chunks else self._trees
        step: HostStep = stored.get(key, lambda: self._made(engine, *key[:4]))
        step.place(rows, chunks)
        return step

    def _made(self, engine: Calls, sequences: int, rows: int, width: int, wanted: int) -> HostStep:
        """Create a step of so many rows in all, the logits of the `wanted` first, and at most `width` a sequence."""
        per_call = wanted if _is_packed(engine) else width
        sizes = _sizes(engine, {"B": sequences, "T": width, "N": rows, "R": per_call})
        shared = {
            spec.name: self._shared(spec, sized(spec.shape, sizes)) for spec in engine.outputs if not spec.in_place_of
        }
        return HostStep(self, engine.make(sizes, arrays=shared), width)

    def _shared(self, spec: TensorSpec, shape: tuple[int, ...]) -> FloatArray:
        """Return an output of a step. All steps share its memory: 32 rows of a large vocabulary take 20 MB."""
        size = math.prod(shape)
        if spec.name not in self._outputs or self._outputs[spec.name].size < size:
            self._trees.clear()
            self._with_chunks.clear()
            rows = size // shape[-1]
            capacity = (1 << (rows - 1).bit_length()) * shape[-1]
            self._outputs[spec.name] = aligned(replace(spec, shape=(capacity,)), {})
        return self._outputs[spec.name][:size].reshape(shape)

    def prefill(self, width: int, slot: int) -> HostPrefill:
        """Return the step for chunks of `width` tokens in a slot. The steps of all slots share arrays."""
        rows = self.fewest_rows
        step: HostPrefill = self._prefills.get((width, rows), lambda: HostPrefill(self, self._engine, width, rows))
        step.take(slot)
        return step


def _takes_trees(engine: Calls) -> bool:
    return _has(engine, names.TREE_MASK)


def _is_packed(engine: Calls) -> bool:
    return _has(engine, names.PACKED_ROWS)


def _has(engine: Calls, name: str) -> bool:
    return any(spec.name == name for spec in engine.inputs)


def _sizes(engine: Calls, sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of the symbols in an engine's graph. The graph for a single sequence has no B, others no N."""
    symbols = {dim for spec in (*engine.inputs, *engine.outputs) for dim in spec.shape}
    return {symbol: size for symbol, size in sizes.items() if symbol in symbols}


class _HostCall:
    """The arrays of an engine's call, by purpose. Rows of all sequences follow each other, N in all."""

    def __init__(self, steps: HostSteps, call: Call, width: int) -> None:
        self.width = width
        self._steps = steps
        inputs, logits = call.inputs, call.outputs[names.LOGITS]
        self._ids: IntArray = inputs[names.TOKEN_IDS].reshape(-1)  # [N]
        self._positions: IntArray = inputs[names.POSITIONS].reshape(-1)  # [N]
        self._packed_rows: IntArray | None = inputs.get(names.PACKED_ROWS)  # [N]
        self._mask: BoolArray | None = inputs.get(names.TREE_MASK)  # [B, T, T]
        self._cache_len: IntArray = inputs[names.CACHE_LEN]  # [B]
        self._kv_len: IntArray = inputs[names.KV_LEN]  # [1]
        self._output_rows: IntArray = inputs[names.OUTPUT_ROWS]  # [B, R], of a packed graph [1, R]
        self._logits: FloatArray = logits.reshape(-1, logits.shape[-1])  # [N or R, V]
        self._features: dict[str, FloatArray] = {}  # [N, n]
        for state in steps.hidden_states:
            features = call.outputs[names.hidden_states(state)]
            self._features[state] = features.reshape(-1, features.shape[-1])
        self._pending: Pending = ()

    def _gather(self, rows: Sequence[list[int] | slice], slots: range, waiting: Pending) -> None:
        """Copy these feature rows, of the call, of every sequence after the pending ones, for every reader."""
        for reader, offsets in zip(self._steps.readers, waiting, strict=True):
            if offsets is None:
                continue
            for state, buffer in reader.pending_features(slots).items():
                features, pending = self._features[state], array_of(buffer)
                for place, start in enumerate(offsets):
                    taken = features[rows[place]]
                    pending[place, start : start + len(taken)] = taken


class HostStep(_HostCall):
    """A step over trees. It reuses the mask of the previous call if the shape is the same."""

    def __init__(self, steps: HostSteps, call: Call, width: int) -> None:
        super().__init__(steps, call, width)
        self._run = call.run
        self._output_rows[:] = np.arange(self._output_rows.shape[1])
        self._padding = np.eye(width, dtype=np.bool_)
        self._layouts: list[Layout | None] = [None] * len(self._cache_len)
        self._rows: list[int] = []
        self._chunks: Sequence[ChunkRows] = ()

    def place(self, rows: list[int], chunks: Sequence[ChunkRows]) -> None:
        """Give each sequence so many rows from now on, and then each chunk's slot those of the chunk, N in all.

        A graph that is not packed has `width` rows for each sequence, and no chunks.
        """
        if rows == self._rows and not chunks:
            return
        self._rows, self._chunks = rows, chunks
        self._starts = [0, *accumulate(rows)][:-1]
        if self._packed_rows is None:
            return
        counts = [*enumerate(rows), *[(chunk.slot, len(chunk.tokens)) for chunk in chunks]]
        self._packed_rows[:] = np.concatenate([slot * self.width + np.arange(count) for slot, count in counts])

    def fill(
        self, cache_len: Sequence[int], trees: Sequence[Tree], pending: Pending, batch: Sequence[Request] = ()
    ) -> None:
        for slot, (tree, rows) in enumerate(zip(trees, cache_len, strict=True)):
            self._place_tree(slot, tree, rows)
        if self._chunks:
            self._place_chunks(len(trees))
        self._kv_len[0] = int(self._cache_len.max()) + self.width
        self._pending = pending

    def run(self, whole: bool) -> None:
        """Run the engine, and gather features of chunks. The samplers choose in `outcomes`."""
        self._run()
        start = sum(self._rows)
        for chunk in self._chunks:
            rows = slice(start, start := start + len(chunk.tokens))
            self._gather([rows], range(chunk.slot, chunk.slot + 1), chunk.pending)

    def outcomes(self, batch: Sequence[Request], trees: Sequence[Tree]) -> list[Outcome]:
        """Return the samplers' outcomes, after compacting the accepted rows and gathering features."""
        outcomes = []
        for slot, (seq, tree, logits) in enumerate(zip(batch, trees, self.tree_logits(trees), strict=True)):
            outcome = seq.verify(logits, tree)
            if outcome.path:
                self._compact(slot, outcome.path)
            outcomes.append(outcome)
        if self._pending:
            rows = [
                [start, *(start + node for node in outcome.path)] if outcome.path else slice(start, start + 1)
                for start, outcome in zip(self._starts, outcomes, strict=True)
            ]
            self._gather(rows, range(len(outcomes)), self._pending)
        return outcomes

    def tree_logits(self, trees: Sequence[Tree]) -> list[FloatArray]:
        """Return the rows of each tree. The next call of any step overwrites them."""
        return [self._logits[start : start + len(tree)] for start, tree in zip(self._starts, trees, strict=True)]

    def seconds(self) -> float:
        """Return 0: the host is not asynchronous."""
        return 0.0

    def _compact(self, slot: int, path: tuple[int, ...]) -> None:
        """Move the rows of the accepted path directly after the root's, for all layers at once."""
        moved = 0
        while moved < len(path) and path[moved] == moved + 1:
            moved += 1
        if moved < len(path):
            rows = self._steps.kv[:, slot, :, int(self._cache_len[slot]) :]  # [2 layers, H_kv, C - cache_len, D]
            rows[:, :, moved + 1 : len(path) + 1] = rows[:, :, list(path[moved:])]

    def _place_chunks(self, trees: int) -> None:
        """Write the chunks to their slots. Slots between them have no rows."""
        self._cache_len[trees:] = 0
        start = sum(self._rows)
        for chunk in self._chunks:
            count = len(chunk.tokens)
            self._ids[start : start + count] = chunk.tokens
            self._positions[start : start + count] = np.arange(chunk.start, chunk.start + count)
            self._cache_len[chunk.slot] = chunk.start
            self._layouts[chunk.slot] = None
            if self._mask is not None:
                self._mask[chunk.slot, :count, :count] = np.tri(count, dtype=np.bool_)
            start += count

    def _place_tree(self, slot: int, tree: Tree, cache_len: int) -> None:
        """Write a tree to `slot`. Rows after its nodes are padding with a chain's positions."""
        nodes, start, rows = len(tree.tokens), self._starts[slot], self._rows[slot]
        shape = layout(tree.parents)
        self._ids[start : start + nodes] = tree.tokens
        self._cache_len[slot] = cache_len
        np.add(shape.depths, cache_len, out=self._positions[start : start + nodes])
        if nodes < rows:
            self._ids[start + nodes : start + rows] = 0
            self._positions[start + nodes : start + rows] = np.arange(cache_len + nodes, cache_len + rows)
        if self._layouts[slot] is not shape:
            self._layouts[slot] = shape
            if self._mask is not None:
                self._mask[slot, :nodes, :nodes] = shape.mask  # bits above a mask's diagonal are 0, so they stay 0
                self._mask[slot, nodes:] = self._padding[nodes:]  # nodes attend only to earlier ones


class HostPrefill(_HostCall):
    """A chunk of a prompt. Each slot has a call, and all calls share arrays."""

    def __init__(self, steps: HostSteps, engine: Calls, width: int, rows: int) -> None:
        self._engine = engine
        self._sizes = _sizes(engine, {"B": 1, "T": width, "N": width, "R": rows})
        self._call = engine.make(self._sizes)
        self._calls: LruCache[int, Call] = LruCache(MOST_PREFILLS)
        super().__init__(steps, self._call, width)
        self.logits: Buffer = HostBuffer.of("float32", self._call.outputs[names.LOGITS])  # [1, R, V]
        if self._packed_rows is not None:
            self._packed_rows[:] = np.arange(width)
        if self._mask is not None:
            self._mask[0] = np.tri(width, dtype=np.bool_)

    def take(self, slot: int) -> None:
        """Use this slot from now on."""
        self._slot = slot
        self._call = self._calls.get(slot, lambda: self._engine.make(self._sizes, slot, self._call))

    def fill(self, tokens: IntArray, start: int, pending: Pending) -> None:
        """Set the inputs of the next run. Padding continues the chain, so no valid row sees it."""
        self._ids[: len(tokens)] = tokens
        self._ids[len(tokens) :] = 0
        self._positions[:] = np.arange(start, start + self.width)
        self._cache_len[0] = start
        self._output_rows[0] = len(tokens) - 1
        self._kv_len[0] = start + self.width
        self._pending = pending
        self._chunk = len(tokens)

    def run(self) -> None:
        self._call.run()
        self._gather([slice(self._chunk)], range(self._slot, self._slot + 1), self._pending)
