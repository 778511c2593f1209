"""Calls of every graph of a bundle, over buffers with poisoned rows that must not count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from redraft import names, signatures
from redraft.engines.bundle import Bundle
from redraft.engines.device import numpy_type
from redraft.methods.lyanna import METHOD
from redraft.names import Dtype, TensorSpec
from redraft.runtime.sampling.noise import row_key
from redraft.runtime.tree import ancestor_mask
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_RESAMPLE

Array = np.ndarray[Any, np.dtype[Any]]
STALE: Mapping[Dtype, float] = {"float32": 1e3, "float16": 1e2, "bfloat16": 1e2}
"""Values of rows that a graph may read but must not count. A masked row may be multiplied by zero, so these are finite.
Rows at or past `kv_len`, and of slots that the call does not use, are NaN."""
SLOTS, NODES, CHUNK, MOST_CAPACITY = 3, 13, 32, 256
_CACHES = "kv."


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
        self._lyanna = METHOD.parse_shape(built.shape) if built else None
        self._capacity = min(bundle.manifest.max_model_len, MOST_CAPACITY)
        self._random = np.random.default_rng(7)

    def of(self, graph: str, batches: Sequence[int]) -> Iterator[Call]:
        """The calls that compare a graph."""
        kinds: Mapping[str, Callable[[Sequence[int]], Iterator[Call]]] = {
            names.VERIFIER: self._verifier, LYANNA_DRAFT: self._draft, LYANNA_RESAMPLE: self._resample,
            names.STEP_PREPARE_TREE: self._prepare_tree, names.STEP_ACCEPT: self._accept,
            names.STEP_ACCEPT_SAMPLED: self._accept_sampled,
            names.STEP_COMPACT_KV: self._compact_kv,
            names.STEP_GATHER_FEATURES: self._gather_features, names.STEP_STORE_TREES: self._store_trees,
        }  # fmt: skip
        if graph in kinds:
            return kinds[graph](batches)
        return self._copy_slot(graph)

    def _verifier(self, batches: Sequence[int]) -> Iterator[Call]:
        """A prompt's first chunk and a later one, one token, trees, and a tree that fills the context."""
        chain = np.arange(-1, CHUNK - 1)
        for kind, past in (("first chunk", 0), ("later chunk", self._capacity // 4)):
            yield self._verified(f"prefill, {kind}", chain[None], [past], np.array([[CHUNK - 2]]))
        for batch in batches:
            lengths = self._lengths(batch)
            yield self._verified("one token", np.full((batch, 1), -1), lengths, np.zeros((batch, 1), np.int64))
            trees = np.stack([self._parents(NODES) for _ in range(batch)])
            yield self._verified("tree", trees, lengths, np.tile(np.arange(NODES), (batch, 1)))
        tree = self._parents(NODES)[None]
        yield self._verified("tree to the end", tree, [self._capacity - NODES], np.arange(NODES)[None])

    def _verified(self, kind: str, parents: Array, past: Sequence[int], rows: Array) -> Call:
        batch, nodes = parents.shape
        mask = np.stack([ancestor_mask(tree) for tree in parents])
        kv_len = max(past) + nodes
        values = {
            names.TOKEN_IDS: self._random.integers(0, self._shape.vocabulary, parents.shape),
            names.POSITIONS: np.array(past)[:, None] + mask.sum(2) - 1,
            names.TREE_MASK: mask, names.CACHE_LEN: np.array(past), names.KV_LEN: np.array([kv_len]),
            names.OUTPUT_ROWS: rows,
        }  # fmt: skip
        poisoned, clean = self._caches(signatures.verifier_state(self._shape), self._capacity, past, kv_len)
        written = [range(start, start + nodes) for start in past]
        sizes = {"B": batch, "T": nodes, "R": rows.shape[1]}
        return Call(kind, sizes, {**values, **poisoned}, clean, written)

    def _draft(self, batches: Sequence[int]) -> Iterator[Call]:
        """Few rows to catch up on and many, some of them padding."""
        shape = self._lyanna
        assert shape is not None
        capacity = self._capacity + names.CATCH_UP_ROWS + shape.steps
        for batch in batches:
            past = self._lengths(batch)
            for rows, pending in ((16, [3, 1]), (names.CATCH_UP_ROWS, [names.CATCH_UP_ROWS, 40])):
                kv_len = max(past) + rows
                values = {
                    names.FEATURE_ROWS: self._floats(shape.dtype, batch, rows, shape.hidden),
                    names.TOKENS: self._random.integers(0, shape.vocabulary, (batch, rows)),
                    names.POSITIONS: np.array(past)[:, None] + np.arange(rows),
                    names.NUM_PENDING: np.array(pending[:batch]), names.CACHE_LEN: np.array(past),
                    names.KV_LEN: np.array([kv_len]), **sampling_values(batch, shape.steps),
                }  # fmt: skip
                state = [spec for spec in METHOD.state(shape) if spec.name.startswith(_CACHES)]
                poisoned, clean = self._caches(state, capacity, past, kv_len + shape.steps - 1)
                written = [range(start, start + rows + shape.steps - 1) for start in past]
                left = [range(row.start + n, row.stop) for row, n in zip(written, pending[:batch], strict=True)]
                sizes = {"B": batch, "M": rows}
                values |= self._tables()
                yield Call(f"{rows} rows", sizes, {**values, **poisoned}, clean, written, left)

    def _resample(self, batches: Sequence[int]) -> Iterator[Call]:
        """After one step, and after all steps but the last."""
        shape = self._lyanna
        assert shape is not None
        for batch in batches:
            for used in (1, shape.steps - 1):
                yield Call(f"{used} used", {"B": batch}, {
                    names.CHAIN_LOGITS: self._floats("float32", batch, shape.steps, shape.draft_vocabulary),
                    names.FIRST_STEP: np.full(batch, used), **self._tables(),
                    names.TOKENS: self._random.integers(0, shape.vocabulary, batch),
                    **sampling_values(batch, shape.steps - 1),
                })  # fmt: skip

    def _prepare_tree(self, batches: Sequence[int]) -> Iterator[Call]:
        for batch in batches:
            for nodes in (1, NODES):
                for kind, on_device in (("the host's", [0, 1]), ("a drafter's", [1, 0])):
                    values = {
                        names.HOST_TOKENS: self._random.integers(0, self._shape.vocabulary, (batch, nodes)),
                        names.STORED_TOKENS: self._random.integers(0, self._shape.vocabulary, (batch, NODES)),
                        names.HOST_PARENTS: np.stack([self._parents(nodes) for _ in range(batch)]),
                        names.STORED_PARENTS: np.stack([self._parents(NODES) for _ in range(batch)]),
                        names.ON_DEVICE: np.array(on_device[:batch]),
                        names.CACHE_LEN: np.array(self._lengths(batch)),
                    }
                    yield Call(f"{nodes} nodes, {kind}", {"B": batch, "T": nodes, "S": NODES}, values)

    def _accept(self, batches: Sequence[int]) -> Iterator[Call]:
        """Logits that agree with some branches of each tree; a tree of fewer nodes than the call's width."""
        for batch in batches:
            for nodes in (1, NODES):
                parents = np.stack([self._parents(nodes) for _ in range(batch)])
                logits = self._floats("float32", batch, nodes, self._shape.vocabulary)
                said = np.take_along_axis(logits.argmax(2), np.maximum(parents, 0), 1)
                right = self._random.random(parents.shape) < 0.8
                values = {
                    names.LOGITS: logits, names.PARENTS: parents,
                    names.TOKEN_IDS: np.where(right, said, (said + 1) % self._shape.vocabulary),
                    names.TREE_MASK: np.stack([ancestor_mask(tree) for tree in parents]),
                    names.NODES: np.array([nodes, max(nodes - 4, 1)][:batch]),
                }  # fmt: skip
                sizes = {"B": batch, "T": nodes, "1 + 2 T": 1 + 2 * nodes}
                yield Call(f"{nodes} nodes", sizes, values)

    def _accept_sampled(self, batches: Sequence[int]) -> Iterator[Call]:
        """The same trees with a temperature for each sequence, the last one greedy."""
        for call in self._accept(batches):
            batch, nodes = call.values[names.TOKEN_IDS].shape
            values = {
                **call.values, names.TEMPERATURE: np.linspace(0.8, 0.0, batch, dtype=np.float32),
                names.NOISE_KEYS: self._random.integers(0, 1 << 32, (batch, nodes, 2)),
            }  # fmt: skip
            yield replace(call, values=values)

    def _compact_kv(self, batches: Sequence[int]) -> Iterator[Call]:
        """An accepted path with gaps, and one that is in place already, in buffers of numbers."""
        for batch in batches:
            paths = np.tile(np.arange(NODES), (batch, 1))
            paths[0, 1:4] = (2, 5, 11)
            past = self._lengths(batch)
            state = signatures.verifier_state(self._shape)
            values = {spec.name: self._floats(spec.dtype, *self._cache(spec, self._capacity)) for spec in state}
            sizes = {"B": batch, "T": NODES}
            yield Call("path", sizes, {names.PATH: paths, names.CACHE_LEN: np.array(past), **values})

    def _gather_features(self, batches: Sequence[int]) -> Iterator[Call]:
        for batch in batches:
            hidden, dtype = self._shape.hidden, self._shape.dtype
            paths = np.tile(np.arange(NODES), (batch, 1))
            paths[0, 1:4] = (2, 5, 11)
            room = names.MAX_PENDING_FEATURES
            yield Call("path", {"B": batch, "F": NODES, "T": NODES, "W": room}, {
                names.FEATURE_ROWS: self._floats(dtype, batch, NODES, hidden), names.PATH: paths,
                names.PENDING_FEATURES: self._floats(dtype, batch, room, hidden),
                names.PENDING_OFFSET: np.array([5, 17][:batch]),
            })  # fmt: skip

    def _store_trees(self, batches: Sequence[int]) -> Iterator[Call]:
        """Trees of only the last sequence, and of all."""
        for batch in batches:
            for kind, drafted in (("the last", [0] * (batch - 1) + [3]), ("all", [2] * batch)):
                values = {names.DRAFTED: np.array(drafted)}
                for tokens, parents, nodes in (
                    (names.TREE_TOKENS, names.TREE_PARENTS, 7), (names.STORED_TOKENS, names.STORED_PARENTS, NODES)
                ):  # fmt: skip
                    values[tokens] = self._random.integers(0, self._shape.vocabulary, (batch, nodes))
                    values[parents] = np.stack([self._parents(nodes) for _ in range(batch)])
                yield Call(f"trees of {kind}", {"B": batch, "K": 7, "S": NODES}, values)

    def _copy_slot(self, graph: str) -> Iterator[Call]:
        verifier = graph == names.STEP_COPY_SLOT
        assert verifier or self._lyanna is not None
        state = signatures.verifier_state(self._shape) if verifier else METHOD.state(self._lyanna)  # type: ignore[arg-type]
        sizes = {"B": SLOTS, "C": self._capacity, "W": names.MAX_PENDING_FEATURES}
        values = {spec.name: self._floats(spec.dtype, *sized(spec, sizes)) for spec in state}
        for source, target in ((2, 0), (0, 1)):
            slots = {names.SOURCE_SLOT: np.array([source]), names.TARGET_SLOT: np.array([target])}
            yield Call(f"{source} to {target}", sizes, {**slots, **values})

    def _lengths(self, batch: int) -> list[int]:
        """Rows committed before a call, the longest sequence first."""
        return [self._capacity // (2 + slot * 3) for slot in range(batch)]

    def _parents(self, nodes: int) -> Array:
        return np.array([-1, *(int(self._random.integers(max(0, node - 4), node)) for node in range(1, nodes))])

    def _floats(self, dtype: Dtype, *shape: int) -> Array:
        return from_float(self._random.standard_normal(shape).astype(np.float32), dtype)

    def _tables(self) -> dict[str, Array]:
        assert self._lyanna is not None
        return self._bundle.tables(METHOD.id)

    def _cache(self, spec: TensorSpec, capacity: int) -> tuple[int, ...]:
        return sized(spec, {"B": SLOTS, "C": capacity})

    def _caches(
        self, state: Sequence[TensorSpec], capacity: int, past: Sequence[int], read: int
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """KV buffers with `past` rows that count, poisoned and clean. Rows before `read` may be read."""
        poisoned, clean = {}, {}
        for spec in state:
            numbers = self._random.standard_normal(self._cache(spec, capacity)).astype(np.float32)
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


def sized(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape with the sizes of a call."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def from_float(values: Array, dtype: Dtype) -> Array:
    """Numbers in an element type, rounded to nearest; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values.astype(numpy_type(dtype))


def as_float(values: Array, dtype: Dtype) -> Array:
    """The numbers of an array of an element type."""
    return (values.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else values).astype(np.float32)
