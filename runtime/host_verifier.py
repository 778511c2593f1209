"""The verifier on the host: the engine's call, the arrays that fill it, and the rows that accepted paths keep."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from redraft import names
from redraft.engines.base import Array, Call, Engine
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import Layout, layout, root_only
from redraft.runtime.verifier import Features, Verifier
from redraft.signatures import VerifierShape
from redraft.types import BoolArray, DraftTree, FloatArray, IntArray, Outcome


class HostVerifier(Verifier):
    """See `Verifier`: an engine of `redraft.engines.base`, over arrays of the host."""

    def __init__(
        self, engine: Engine, shape: VerifierShape, capacity: int, slots: int = 1, taps: tuple[str, ...] = ()
    ) -> None:
        super().__init__(shape, capacity, slots, taps)
        self._engine = engine
        self._symbols = {dim for spec in (*engine.inputs, *engine.outputs) for dim in spec.shape}
        self._frames: dict[tuple[int, int, int], _Frame] = {}
        # [2 layers (key, value, key, …), slots, H_kv, C, D]: one array, so that accepted rows move in one go.
        self._kv = np.zeros((2 * shape.layers, slots, shape.kv_heads, capacity, shape.head_dim), dtype=shape.dtype)
        for layer in range(shape.layers):
            engine.bind(names.key_cache(layer), self._kv[2 * layer])
            engine.bind(names.value_cache(layer), self._kv[2 * layer + 1])

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """See `Verifier.verify`."""
        with self.ranges.stage("fill"):
            frame = self._frame(len(batch), width := max(map(len, trees)), width)
            for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
                frame.place(slot, tree, seq.past_len)
            frame.live[0] = max([seq.past_len for seq in batch]) + width
        self._run(frame)
        outcomes = []
        with self.ranges.stage("judge"):
            for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
                outcome = seq.sampler.judge(frame.logits[slot, : len(tree)], tree, seq.past_len)
                self._keep(slot, seq.past_len, outcome.path)
                outcomes.append(outcome)
        return outcomes

    def prefill_chunk(self, seq: Request, tokens: IntArray, start: int, width: int) -> Features:
        """See `Verifier.prefill_chunk`."""
        self._last = frame = self._frame(1, width, 1)
        frame.place_chunk(tokens, start)
        frame.live[0] = start + width
        with self.ranges.stage("prefill"):
            frame.call.run()
        return frame.features(0, len(tokens))

    def first_outcome(self, seq: Request) -> Outcome:
        """See `Verifier.first_outcome`."""
        return seq.sampler.judge(self._last.logits[0], root_only(seq.tokens[-1]), seq.prompt_length - 1)

    def features(self, slot: int, nodes: int) -> Features:
        """See `Verifier.features`."""
        return self._last.features(slot, nodes)

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`."""
        self._kv[:, target, :, :rows] = self._kv[:, source, :, :rows]

    def measure_ms(self, sequences: int, nodes: int, live: int) -> float:
        """See `Verifier.measure_ms`."""
        frame = self._frame(sequences, nodes, nodes)
        chain = DraftTree(np.zeros(nodes, np.int64), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))
        past_len = min(live, self.capacity - nodes)
        for slot in range(sequences):
            frame.place(slot, chain, past_len)
        frame.live[0] = past_len + nodes
        start = time.perf_counter()
        frame.call.run()
        return (time.perf_counter() - start) * 1e3

    def _run(self, frame: _Frame) -> None:
        with self.ranges.stage("verify"), self.ranges.call(names.VERIFIER):
            frame.call.run()
        self._last = frame

    def _keep(self, slot: int, past_len: int, path: tuple[int, ...]) -> None:
        """Move the rows of the accepted path behind the root's, all layers at once; those in place stay."""
        moved = 0
        while moved < len(path) and path[moved] == moved + 1:
            moved += 1
        if moved < len(path):
            rows = self._kv[:, slot, :, past_len:]  # [2 layers, H_kv, C - past_len, D]
            rows[:, :, moved + 1 : len(path) + 1] = rows[:, :, list(path[moved:])]

    def _frame(self, sequences: int, width: int, rows: int) -> _Frame:
        frame = self._frames.get((sequences, width, rows))
        if frame is None:
            sizes = {"B": sequences, "T": width, "R": rows}
            call = self._engine.prepare(**{symbol: size for symbol, size in sizes.items() if symbol in self._symbols})
            frame = self._frames[sequences, width, rows] = _Frame(call, width, rows, self._taps)
        return frame


class _Frame:
    """The arrays of one call, filled a slot at a time. A mask already there from the call before is not rewritten."""

    def __init__(self, call: Call, width: int, rows: int, taps: tuple[str, ...]) -> None:
        self.call = call
        self.width = width
        inputs = call.inputs
        self.ids: IntArray = inputs[names.TOKEN_IDS]  # [B, T]
        self.positions: IntArray = inputs[names.POSITIONS]  # [B, T]
        self.mask: BoolArray = inputs[names.TREE_MASK]  # [B, T, T]
        self.past_len: IntArray = inputs[names.PAST_LEN]  # [B]
        self.live: IntArray = inputs[names.LIVE]  # [1]
        self.output_rows: IntArray = inputs[names.OUTPUT_ROWS]  # [B, R]
        self.logits: FloatArray = call.outputs[names.LOGITS]  # [B, R, V]
        self.output_rows[:] = np.arange(rows)
        self._padding = np.eye(width, dtype=np.bool_)
        self._taps: dict[str, Array] = {tap: call.outputs[names.features(tap)] for tap in taps}  # [B, T, n]
        self._layouts: list[Layout | None] = [None] * len(self.ids)

    def place(self, slot: int, tree: DraftTree, past_len: int) -> None:
        """Put a tree into `slot`; rows past its nodes are padding, which sees only itself."""
        nodes = len(tree.tokens)
        shape = layout(tree.parents)
        self.ids[slot, :nodes] = tree.tokens
        self.past_len[slot] = past_len
        np.add(shape.depths, past_len, out=self.positions[slot, :nodes])
        if nodes < self.width:
            self.ids[slot, nodes:] = 0
            self.positions[slot, nodes:] = past_len
        if self._layouts[slot] is not shape:
            self._layouts[slot] = shape
            self.mask[slot, :nodes, :nodes] = shape.mask
            self.mask[slot, nodes:] = self._padding[nodes:]  # nodes see earlier ones only: right of them nothing is set

    def place_chunk(self, tokens: IntArray, start: int) -> None:
        """Put part of a prompt into slot 0; padding continues the chain, where nothing that counts can see it."""
        if self._layouts[0] is None:
            self.mask[0] = np.tri(self.width, dtype=np.bool_)
            self._layouts[0] = Layout(self.mask[0], np.arange(self.width))
        self.ids[0, : len(tokens)] = tokens
        self.ids[0, len(tokens) :] = 0
        self.positions[0] = np.arange(start, start + self.width)
        self.past_len[0] = start
        self.output_rows[0, 0] = len(tokens) - 1

    def features(self, slot: int, nodes: int) -> Features:
        """Feature rows of the first `nodes` nodes of `slot`."""
        return {tap: rows[slot, :nodes] for tap, rows in self._taps.items()}
