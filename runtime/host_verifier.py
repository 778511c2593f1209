"""The verifier on the host: the engine's call, the arrays that fill it, and the rows that accepted paths keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from redraft import names
from redraft.engines import open_engine
from redraft.engines.base import Array, Call, Engine
from redraft.engines.bundle import Bundle
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import Layout, chain, is_chain, layout, root_only
from redraft.runtime.verifier import Features, Verifier
from redraft.signatures import VerifierShape
from redraft.types import BoolArray, DraftTree, FloatArray, IntArray, Outcome

BLOCK_ROWS = 128
"""Rows that the CPU's products add up at a time, or a part of them (`redraft.engines.lowering.order`)."""


def open_host_verifier(
    bundle: Bundle, graph: str, max_model_len: int, max_num_seqs: int = 1, threads: int | None = None
) -> HostVerifier:
    """The verifier over one of the bundle's graphs (`Bundle.host_graph`). Raises BundleError and BackendError."""
    manifest = bundle.manifest
    engine = open_engine(bundle, graph, threads)
    trees = partial(open_engine, bundle, names.VERIFIER_BATCH, threads)
    verifier = HostVerifier(engine, manifest.shape, max_model_len, max_num_seqs, manifest.hidden_states, trees)
    verifier.block_rows = BLOCK_ROWS if graph in (names.VERIFIER_BATCH, names.VERIFIER_SINGLE) else None
    return verifier


class HostVerifier(Verifier):
    """See `Verifier`: engines of `redraft.engines.base`, over arrays of the host.

    An engine without a mask takes chains only; trees that branch go to the one that `tree_engine` opens when
    `take_branches` is called, over the same arrays.
    """

    def __init__(
        self, engine: Engine, shape: VerifierShape, max_model_len: int, max_num_seqs: int = 1,
        hidden_states: tuple[str, ...] = (),
        tree_engine: Callable[[], Engine] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape, max_model_len, max_num_seqs, hidden_states)
        self._engine = engine
        self._steps: dict[tuple[int, int, int, bool], _BoundStep] = {}
        self._layers = shape.layers
        self._open_trees = tree_engine
        self._trees = engine if any(spec.name == names.TREE_MASK for spec in engine.inputs) else None
        self.branches = self._trees is not None
        self.prefers_chains = not self.branches
        # [2 layers (key, value, key, …), slots, H_kv, C, D]: one array, so that accepted rows move in one go.
        self._kv = np.zeros(
            (2 * shape.layers, max_num_seqs, shape.kv_heads, max_model_len, shape.head_dim), dtype=shape.dtype
        )
        self._bind(engine)

    def _bind(self, engine: Engine) -> None:
        for layer in range(self._layers):
            engine.bind(names.key_cache(layer), self._kv[2 * layer])
            engine.bind(names.value_cache(layer), self._kv[2 * layer + 1])

    def take_branches(self) -> None:
        """See `Verifier.take_branches`."""
        if self._trees is None and self._open_trees is not None:
            self._trees = self._open_trees()
            self._bind(self._trees)
            self.branches = True

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """See `Verifier.verify`."""
        with self.ranges.stage("fill"):
            step = self._filled(trees, [seq.cache_len for seq in batch])
        self._run(step)
        outcomes = []
        with self.ranges.stage("judge"):
            for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
                outcome = seq.sampler.verify(step.logits[slot, : len(tree)], tree, seq.cache_len)
                self._keep(slot, seq.cache_len, outcome.path)
                outcomes.append(outcome)
        return outcomes

    def prefill_chunk(self, seq: Request, tokens: IntArray, start: int, width: int) -> Features:
        """See `Verifier.prefill_chunk`."""
        self._last = step = self._filled_chunk(tokens, start, width)
        with self.ranges.stage("prefill"):
            step.call.run()
        return step.features(0, len(tokens))

    def first_outcome(self, seq: Request) -> Outcome:
        """See `Verifier.first_outcome`."""
        return seq.sampler.verify(self._last.logits[0], root_only(seq.tokens[-1]), seq.prompt_length - 1)

    def features(self, slot: int, nodes: int) -> Features:
        """See `Verifier.features`."""
        return self._last.features(slot, nodes)

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`."""
        self._kv[:, target, :, :rows] = self._kv[:, source, :, :rows]

    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        """See `Verifier.measure_ms`."""
        step = self._filled(
            [chain(np.zeros(nodes, np.int64))] * sequences,
            [min(kv_len, self.max_model_len - max(nodes, 2))] * sequences,
        )
        start = time.perf_counter()
        step.call.run()
        return (time.perf_counter() - start) * 1e3

    def logits(self, trees: Sequence[DraftTree], cache_lens: Sequence[int]) -> list[FloatArray]:
        """Logits [nodes, V] of one tree a slot, from slot 0 on, after so many rows. Rows of KV are overwritten."""
        step = self._filled(trees, cache_lens)
        step.call.run()
        return [step.logits[slot, : len(tree)].copy() for slot, tree in enumerate(trees)]

    def chunk_logits(self, tokens: IntArray, start: int, width: int) -> FloatArray:
        """Logits [1, V] after part of a prompt, computed as `prefill_chunk` does."""
        step = self._filled_chunk(tokens, start, width)
        step.call.run()
        return step.logits[0, :1].copy()

    def forget_calls(self) -> None:
        """Give the arrays of all calls back; those of the next ones are made anew."""
        self._steps.clear()

    def _filled_chunk(self, tokens: IntArray, start: int, width: int) -> _BoundStep:
        step = self._step_of(1, width, self.fewest_rows)
        step.place_chunk(tokens, start)
        step.kv_len[0] = start + width
        return step

    def _filled(self, trees: Sequence[DraftTree], cache_lens: Sequence[int]) -> _BoundStep:
        width = max(map(len, trees))
        if width * len(trees) < self.fewest_rows:
            width = self.fewest_rows
        branched = self._trees is not self._engine and not all(map(is_chain, trees))
        step = self._step_of(len(trees), width, width, branched)
        for slot, (tree, cache_len) in enumerate(zip(trees, cache_lens, strict=True)):
            step.place(slot, tree, cache_len)
        step.kv_len[0] = max(cache_lens) + width
        return step

    def _run(self, step: _BoundStep) -> None:
        with self.ranges.stage("verify"), self.ranges.call(names.VERIFIER):
            step.call.run()
        self._last = step

    def _keep(self, slot: int, cache_len: int, path: tuple[int, ...]) -> None:
        """Move the rows of the accepted path behind the root's, all layers at once; those in place stay."""
        moved = 0
        while moved < len(path) and path[moved] == moved + 1:
            moved += 1
        if moved < len(path):
            rows = self._kv[:, slot, :, cache_len:]  # [2 layers, H_kv, C - cache_len, D]
            rows[:, :, moved + 1 : len(path) + 1] = rows[:, :, list(path[moved:])]

    def _step_of(self, sequences: int, width: int, rows: int, branched: bool = False) -> _BoundStep:
        step = self._steps.get((sequences, width, rows, branched))
        if step is None:
            engine = self._trees if branched else self._engine
            assert engine is not None, "trees that branch were not asked for: take_branches"
            symbols = {dim for spec in (*engine.inputs, *engine.outputs) for dim in spec.shape}
            sizes = {"B": sequences, "T": width, "R": rows}
            call = engine.prepare(**{symbol: size for symbol, size in sizes.items() if symbol in symbols})
            step = self._steps[sequences, width, rows, branched] = _BoundStep(call, width, rows, self._hidden_states)
        return step


class _BoundStep:
    """The arrays of one call, filled a slot at a time. A mask already there from the call before is not rewritten."""

    def __init__(self, call: Call, width: int, rows: int, hidden_states: tuple[str, ...]) -> None:
        self.call = call
        self.width = width
        inputs = call.inputs
        self.ids: IntArray = inputs[names.TOKEN_IDS]  # [B, T]
        self.positions: IntArray = inputs[names.POSITIONS]  # [B, T]
        self.mask: BoolArray | None = inputs.get(names.TREE_MASK)  # [B, T, T]
        self.cache_len: IntArray = inputs[names.CACHE_LEN]  # [B]
        self.kv_len: IntArray = inputs[names.KV_LEN]  # [1]
        self.output_rows: IntArray = inputs[names.OUTPUT_ROWS]  # [B, R]
        self.logits: FloatArray = call.outputs[names.LOGITS]  # [B, R, V]
        self.output_rows[:] = np.arange(rows)
        self._padding = np.eye(width, dtype=np.bool_)
        self._hidden_states: dict[str, Array] = {
            hidden_state: call.outputs[names.hidden_states(hidden_state)] for hidden_state in hidden_states
        }  # [B, T, n]
        self._layouts: list[Layout | None] = [None] * len(self.ids)

    def place(self, slot: int, tree: DraftTree, cache_len: int) -> None:
        """Put a tree into `slot`; rows past its nodes are padding, in the places that a chain's would have."""
        nodes = len(tree.tokens)
        shape = layout(tree.parents)
        self.ids[slot, :nodes] = tree.tokens
        self.cache_len[slot] = cache_len
        np.add(shape.depths, cache_len, out=self.positions[slot, :nodes])
        if nodes < self.width:
            self.ids[slot, nodes:] = 0
            self.positions[slot, nodes:] = np.arange(cache_len + nodes, cache_len + self.width)
        if self._layouts[slot] is not shape:
            self._layouts[slot] = shape
            if self.mask is not None:
                self.mask[slot, :nodes, :nodes] = shape.mask
                self.mask[slot, nodes:] = self._padding[nodes:]  # nodes see earlier ones: right of them nothing is set

    def place_chunk(self, tokens: IntArray, start: int) -> None:
        """Put part of a prompt into slot 0; padding continues the chain, where nothing that counts can see it."""
        if self._layouts[0] is None:
            mask = np.tri(self.width, dtype=np.bool_)
            self._layouts[0] = Layout(mask, np.arange(self.width))
            if self.mask is not None:
                self.mask[0] = mask
        self.ids[0, : len(tokens)] = tokens
        self.ids[0, len(tokens) :] = 0
        self.positions[0] = np.arange(start, start + self.width)
        self.cache_len[0] = start
        self.output_rows[0] = len(tokens) - 1

    def features(self, slot: int, nodes: int) -> Features:
        """Feature rows of the first `nodes` nodes of `slot`."""
        return {hidden_state: rows[slot, :nodes] for hidden_state, rows in self._hidden_states.items()}
