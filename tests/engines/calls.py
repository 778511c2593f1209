"""Calls of every graph of a bundle, over buffers with poisoned rows that must not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from redraft import names, signatures
from redraft.engines.bundle import Bundle
from redraft.engines.device import numpy_type, sized
from redraft.methods.lyanna import METHOD
from redraft.names import Dtype, TensorSpec
from redraft.runtime.sampling.noise import row_key
from redraft.runtime.trees.tree import ancestor_mask
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_RESAMPLE

Array = np.ndarray[Any, np.dtype[Any]]
STALE: Mapping[Dtype, float] = {"float32": 1e3, "float16": 1e2, "bfloat16": 1e2}
"""Values of rows that a graph may read but must not count. A masked row may be multiplied by zero, so these are finite.
Rows at or past `kv_len`, and of slots that the call does not use, are NaN."""
SLOTS, NODES, CHUNK, MOST_CAPACITY = 3, 13, 32, 256
BATCHES = (1, 2)
"""Sequences of the calls of every kind but prefill and copies of slots."""


@dataclass(frozen=True)
class Call:
    """One call of a graph.

    kind:    what it is, for messages.   sizes: of symbols.
    values:  inputs by name; KV buffers have SLOTS slots, of which the call uses the first `sizes["B"]`.
    clean:   KV buffers again, with zeros in place of what must not count.
    rows:    rows of each sequence that KV buffers may change in.
    left:    of these, the ones that a drafter leaves behind those that count, and that the next call writes anew.
    """

    kind: str
    sizes: Mapping[str, int]
    values: Mapping[str, Array]
    clean: Mapping[str, Array] = field(default_factory=dict)
    rows: Sequence[range] = ()
    left: Sequence[range] = ()


class Calls:
    """Inputs for the graphs of a bundle, equal in every run."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._shape = bundle.manifest.shape
        built = bundle.manifest.drafters.get(METHOD.id)
        self._lyanna: Any = METHOD.parse_shape(built.shape) if built else None
        self._tables = bundle.tables(METHOD.id) if built else {}
        self._capacity = min(bundle.manifest.max_model_len, MOST_CAPACITY)
        self._random = np.random.default_rng(7)

    def of(self, graph: str) -> Iterator[Call]:
        """The calls that compare a graph. Inputs that a kind of call does not choose are random."""
        kinds: Mapping[str, Callable[[int], Iterator[Call]]] = {
            names.VERIFIER: self._verifier, LYANNA_DRAFT: self._draft, LYANNA_RESAMPLE: self._resample,
            names.STEP_PREPARE_TREE: self._prepare_tree, names.STEP_ACCEPT: self._accept,
            names.STEP_ACCEPT_SAMPLED: self._accept_sampled, names.STEP_COMPACT_KV: self._compact_kv,
            names.STEP_GATHER_FEATURES: self._gather_features, names.STEP_STORE_TREES: self._store_trees,
        }  # fmt: skip
        for batch in BATCHES:
            for call in kinds.get(graph, self._copy_slot)(batch):
                others = (spec for spec in self._bundle.graph(graph).inputs if spec.name not in call.values)
                yield replace(call, values={**{spec.name: self._any(spec, call) for spec in others}, **call.values})

    def _any(self, spec: TensorSpec, call: Call) -> Array:
        """Valid values of an input."""
        shape = sized(spec.shape, {"C": self._capacity, "W": names.MAX_PENDING_FEATURES, **call.sizes})
        if spec.name in self._tables:
            return self._tables[spec.name]
        if spec.name.endswith("parents"):
            return self._parents(*shape)
        if spec.name.endswith(("tokens", "token_ids")):
            return self._random.integers(0, self._shape.vocabulary, shape)
        return self._floats(spec.dtype, SLOTS if names.is_cache(spec.name) else shape[0], *shape[1:])

    def _verifier(self, batch: int) -> Iterator[Call]:
        """A prompt's first chunk and a later one, one token, trees, and a tree that fills the context."""
        lengths, nodes = self._lengths(batch), np.tile(np.arange(NODES), (batch, 1))
        if batch == 1:
            chain = np.arange(-1, CHUNK - 1)[None]
            for kind, past in (("first chunk", 0), ("later chunk", self._capacity // 4)):
                yield self._verified(f"prefill, {kind}", chain, [past], np.array([[CHUNK - 2]]))
            yield self._verified("tree to the end", self._parents(1, NODES), [self._capacity - NODES], nodes)
        yield self._verified("one token", np.full((batch, 1), -1), lengths, np.zeros((batch, 1), np.int64))
        yield self._verified("tree", self._parents(batch, NODES), lengths, nodes)

    def _verified(self, kind: str, parents: Array, past: Sequence[int], rows: Array) -> Call:
        batch, nodes = parents.shape
        mask = np.stack([ancestor_mask(tree) for tree in parents])
        kv_len = max(past) + nodes
        values = {
            names.POSITIONS: np.array(past)[:, None] + mask.sum(2) - 1, names.TREE_MASK: mask,
            names.CACHE_LEN: np.array(past), names.KV_LEN: np.array([kv_len]), names.OUTPUT_ROWS: rows,
        }  # fmt: skip
        poisoned, clean = self._caches(signatures.verifier_state(self._shape), self._capacity, past, kv_len)
        written = [range(start, start + nodes) for start in past]
        return Call(kind, {"B": batch, "T": nodes, "R": rows.shape[1]}, {**values, **poisoned}, clean, written)

    def _draft(self, batch: int) -> Iterator[Call]:
        """Few rows to catch up on and many, some of them padding."""
        steps, past = self._lyanna.steps, self._lengths(batch)
        capacity = self._capacity + names.CATCH_UP_ROWS + steps
        state = [spec for spec in METHOD.state(self._lyanna) if names.is_cache(spec.name)]
        for rows, pending in ((16, [3, 1]), (names.CATCH_UP_ROWS, [names.CATCH_UP_ROWS, 40])):
            kv_len = max(past) + rows
            values = {
                names.POSITIONS: np.array(past)[:, None] + np.arange(rows), names.CACHE_LEN: np.array(past),
                names.NUM_PENDING: np.array(pending[:batch]), names.KV_LEN: np.array([kv_len]),
                **sampling_values(batch, steps),
            }  # fmt: skip
            poisoned, clean = self._caches(state, capacity, past, kv_len + steps - 1)
            written = [range(start, start + rows + steps - 1) for start in past]
            left = [range(row.start + n, row.stop) for row, n in zip(written, pending[:batch], strict=True)]
            yield Call(f"{rows} rows", {"B": batch, "M": rows}, {**values, **poisoned}, clean, written, left)

    def _resample(self, batch: int) -> Iterator[Call]:
        """After one step, and after all steps but the last."""
        for used in (1, self._lyanna.steps - 1):
            values = {names.FIRST_STEP: np.full(batch, used), **sampling_values(batch, self._lyanna.steps - 1)}
            yield Call(f"{used} used", {"B": batch}, values)

    def _prepare_tree(self, batch: int) -> Iterator[Call]:
        for nodes in (1, NODES):
            for kind, on_device in (("the host's", [0, 1]), ("a drafter's", [1, 0])):
                values = {names.ON_DEVICE: np.array(on_device[:batch]), names.CACHE_LEN: np.array(self._lengths(batch))}
                yield Call(f"{nodes} nodes, {kind}", {"B": batch, "T": nodes, "S": NODES}, values)

    def _accept(self, batch: int) -> Iterator[Call]:
        """Logits that agree with some branches of each tree; a tree of fewer nodes than the call's width."""
        for nodes in (1, NODES):
            parents, logits = self._parents(batch, nodes), self._floats("float32", batch, nodes, self._shape.vocabulary)
            said = np.take_along_axis(logits.argmax(2), np.maximum(parents, 0), 1)
            right = self._random.random(parents.shape) < 0.8
            values = {
                names.LOGITS: logits, names.PARENTS: parents,
                names.TOKEN_IDS: np.where(right, said, (said + 1) % self._shape.vocabulary),
                names.TREE_MASK: np.stack([ancestor_mask(tree) for tree in parents]),
                names.NODES: np.array([nodes, max(nodes - 4, 1)][:batch]),
            }  # fmt: skip
            yield Call(f"{nodes} nodes", {"B": batch, "T": nodes, "1 + 2 T": 1 + 2 * nodes}, values)

    def _accept_sampled(self, batch: int) -> Iterator[Call]:
        """The same trees with a temperature for each sequence, the last one greedy."""
        for call in self._accept(batch):
            keys = self._random.integers(0, 1 << 32, (batch, call.sizes["T"], 2))
            sampled = {names.TEMPERATURE: np.linspace(0.8, 0.0, batch, dtype=np.float32), names.NOISE_KEYS: keys}
            yield replace(call, values={**call.values, **sampled})

    def _compact_kv(self, batch: int) -> Iterator[Call]:
        """In buffers of numbers."""
        values = {names.PATH: _paths(batch), names.CACHE_LEN: np.array(self._lengths(batch))}
        yield Call("path", {"B": batch, "T": NODES}, values)

    def _gather_features(self, batch: int) -> Iterator[Call]:
        values = {names.PATH: _paths(batch), names.PENDING_OFFSET: np.array([5, 17][:batch])}
        yield Call("path", {"B": batch, "F": NODES, "T": NODES, "W": names.MAX_PENDING_FEATURES}, values)

    def _store_trees(self, batch: int) -> Iterator[Call]:
        """Trees of only the last sequence, and of all."""
        for kind, drafted in (("the last", [0] * (batch - 1) + [3]), ("all", [2] * batch)):
            yield Call(f"trees of {kind}", {"B": batch, "K": 7, "S": NODES}, {names.DRAFTED: np.array(drafted)})

    def _copy_slot(self, batch: int) -> Iterator[Call]:
        source, target = ((2, 0), (0, 1))[batch - 1]
        slots = {names.SOURCE_SLOT: np.array([source]), names.TARGET_SLOT: np.array([target])}
        yield Call(f"{source} to {target}", {"B": SLOTS}, slots)

    def _lengths(self, batch: int) -> list[int]:
        """Rows committed before a call, the longest sequence first."""
        return [self._capacity // (2 + slot * 3) for slot in range(batch)]

    def _parents(self, batch: int, nodes: int) -> Array:
        """Random trees, in which a node's parent is one of the four before it."""
        node = np.arange(1, nodes)
        later = self._random.integers(np.maximum(node - 4, 0), node, (batch, nodes - 1))
        return np.concatenate([np.full((batch, 1), -1), later], axis=1)

    def _floats(self, dtype: Dtype, *shape: int) -> Array:
        return from_float(self._random.standard_normal(shape).astype(np.float32), dtype)

    def _caches(
        self, state: Sequence[TensorSpec], capacity: int, past: Sequence[int], read: int
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """KV buffers with `past` rows that count, poisoned and clean. Rows before `read` may be read."""
        poisoned, clean = {}, {}
        for spec in state:
            numbers = self._random.standard_normal(sized(spec.shape, {"B": SLOTS, "C": capacity})).astype(np.float32)
            bad = np.full_like(numbers, np.nan)
            bad[: len(past), :, :read] = STALE[spec.dtype]
            for slot, rows in enumerate(past):
                bad[slot, :, :rows] = numbers[slot, :, :rows]
                numbers[slot, :, rows:] = 0
            numbers[len(past) :] = 0
            poisoned[spec.name], clean[spec.name] = from_float(bad, spec.dtype), from_float(numbers, spec.dtype)
        return poisoned, clean


def sampling_values(batch: int, steps: int, noise_scale: float = 0.7) -> dict[str, Array]:
    """Inputs of `sampling_inputs`: other factors and keys for each sequence; the first has no noise."""
    return {
        names.DRAFT_LOGIT_SCALE: np.linspace(1.0, 1.5, batch, dtype=np.float32),
        names.NOISE_SCALE: np.linspace(0.0, noise_scale, batch, dtype=np.float32),
        names.NOISE_KEYS: np.array([[row_key(slot, 40 + step) for step in range(steps)] for slot in range(batch)]),
        names.DRAWN: np.zeros(batch, np.int64),
    }


def _paths(batch: int) -> Array:
    """An accepted path with gaps, and others that are in place already."""
    paths = np.tile(np.arange(NODES), (batch, 1))
    paths[0, 1:4] = (2, 5, 11)
    return paths


def from_float(values: Array, dtype: Dtype) -> Array:
    """Numbers in an element type, rounded to nearest; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values.astype(numpy_type(dtype))


def as_float(values: Array, dtype: Dtype) -> Array:
    """The numbers of an array of an element type."""
    return (values.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else values).astype(np.float32)
