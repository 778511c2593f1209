"""Every graph of a bundle on one device against another: what it gives, and which rows of its buffers it writes.

`compare_outputs` knows devices by their protocol only. Here it holds TensorRT's programs on fakes, and ONNX Runtime,
against ONNX Runtime on the CPU, with faults planted that it must see; on a GPU it holds CUDA and real engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft import names, signatures
from redraft.bench.gpu_bundle import missing
from redraft.cli.assembly import build_bundle
from redraft.cli.models import Model
from redraft.config import Backend, BuildConfig, LyannaBuild, Precision, TensorRtBuild
from redraft.engines import open_bundle, open_device
from redraft.engines.bundle import Bundle
from redraft.engines.device import Buffer, Device, Inbox, Program, Run, numpy_type
from redraft.engines.onnxruntime_device import HostDevice
from redraft.engines.tensorrt.profiles import Limits, profiles_of
from redraft.engines.tensorrt.records import Attention
from redraft.engines.tensorrt.stage import GRAPHS as STAGED
from redraft.names import Dtype, TensorSpec
from redraft.runtime.tree import ancestor_mask
from tests.runtime.devices import cpu_device, tensorrt_device

Array = np.ndarray[Any, np.dtype[Any]]
TOLERANCES: Mapping[Dtype, float] = {"float32": 1e-4, "float16": 6e-3, "bfloat16": 5e-2}
"""Largest error of an output, of the largest value of that output, by the element type that the graph computes in.

Rounding every weight and sum of the embedded model's 12 layers to fp16 moves its outputs by at most 1.8e-3 in these
calls, 3.6 of the type's unit roundoff u = 4.9e-4; two devices differ by less, as they share the weights. Three times
that leaves room for deeper models and other orders of sums. bf16 has eight times the roundoff. In fp32 (u = 6e-8) the
order of sums over K up to 11008 products counts, sqrt(K) u = 6e-6, and much room. TF32's products (u = 4.9e-4) are
beyond it, and should be: a bundle in fp32 asks for fp32.
"""
STALE: Mapping[Dtype, float] = {"float32": 1e3, "float16": 1e2, "bfloat16": 1e2}
"""What rows hold that may be read but must not count. A masked row may be multiplied by zero, so these are finite;
rows at or past `live`, and of slots that the call does not use, are NaN."""
GRAPHS = (
    names.VERIFIER, names.LYANNA_DRAFT, names.LYANNA_RESAMPLE, names.STEP_LAYOUT, names.STEP_ACCEPT, names.STEP_KEEP,
    names.STEP_COLLECT, names.STEP_MOVE, names.LYANNA_MOVE,
)  # fmt: skip
SLOTS, NODES, CHUNK, MOST_CAPACITY = 3, 13, 32, 256
_CACHES = "kv."
_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)


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


def compare_outputs(
    device: Device, reference: Device, bundle: Bundle, graphs: Sequence[str] = GRAPHS,
    batches: Sequence[int] = (1, 2), left: bool = True,
) -> dict[str, float]:  # fmt: skip
    """The largest error by graph and call, for the graphs that the bundle has; batches: of one token and of trees.

    left: both leave the same in rows that do not count (`Call.left`); native attention writes no row of a chain there.
    `device` runs over buffers whose stale rows are poisoned, `reference` over clean ones. Raises AssertionError for an
    output beyond TOLERANCES, for another integer, and for a row changed that the call does not write.
    """
    made = Calls(bundle)
    errors: dict[str, float] = {}
    for graph in graphs:
        if graph not in bundle.manifest.graphs:
            continue
        ours, theirs = device.program(graph), reference.program(graph)
        for call in made.of(graph, batches):
            if left:
                call = replace(call, left=())
            found = run(device, ours, call.values, call.sizes)
            expected = run(reference, theirs, {**call.values, **call.clean}, call.sizes)
            where = f"{graph}, {call.kind}, B={call.sizes['B']}"
            errors[where] = _compare(where, ours.outputs, call, found, expected, bundle.manifest.shape.dtype)
    return errors


def run(device: Device, program: Program, values: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Every output of a call; of one in place the whole buffer, the slots that are not used included."""
    whole: dict[str, Buffer] = {}
    bound: dict[str, Buffer] = {}
    sent = {name: values[name] for name in (names.LIVE, names.SOURCE_SLOT, names.TARGET_SLOT) if name in values}
    inbox = device.inbox(**{name: given.shape for name, given in sent.items()})
    for name, given in sent.items():
        inbox.open()[name][:] = given
    inbox.send()
    whole.update(inbox.buffers)
    for spec in program.inputs:
        if spec.name not in sent:
            whole[spec.name] = device.empty(spec.dtype, *values[spec.name].shape)
            whole[spec.name].write(values[spec.name])
        leading = (sizes["B"],) if spec.shape[0] == "B" else values[spec.name].shape[:1]
        bound[spec.name] = whole[spec.name].part(*leading, *values[spec.name].shape[1:])
    for spec in program.outputs:
        if spec.in_place_of:
            whole[spec.name], bound[spec.name] = whole[spec.in_place_of], bound[spec.in_place_of]
        else:
            whole[spec.name] = bound[spec.name] = device.empty(spec.dtype, *_sized(spec, sizes))
    program.bind(bound)()
    return {spec.name: whole[spec.name].read() for spec in program.outputs}


def _compare(
    where: str, specs: Sequence[TensorSpec], call: Call, found: Mapping[str, Array], expected: Mapping[str, Array],
    carrier: Dtype,
) -> float:  # fmt: skip
    """The largest error of a call's outputs."""
    errors = [0.0]
    count = expected.get(names.TREE_COUNT, np.array(0))
    for spec in specs:
        ours, theirs, name = found[spec.name], expected[spec.name], f"{where}: {spec.name}"
        if spec.name in _TREE[:2]:
            continue  # with the log-probabilities, by which nodes are in order
        if spec.in_place_of in call.clean:
            assert spec.in_place_of is not None
            counting = ~_marked(call.left, ours)
            changed = counting & _changed_rows(name, call, ours, call.values[spec.in_place_of])
            wanted = counting & _changed_rows(f"{name} of the reference", call, theirs, call.clean[spec.in_place_of])
            np.testing.assert_array_equal(changed, wanted, f"{name}: other rows were written")
            ours, theirs = (as_float(rows, spec.dtype).swapaxes(1, 2)[changed] for rows in (ours, theirs))
            errors.append(_error(name, ours, theirs, TOLERANCES[carrier]))
        elif spec.in_place_of or not spec.dtype.startswith(("float", "bfloat")):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), f"{name}: expected the same bits")
        else:
            if spec.name == names.TREE_LOG_PROBS:
                for slot in range(len(ours)):
                    nodes = int(count[slot]) if count.ndim else ours.shape[1]
                    trees = [[given[part][slot, :nodes] for part in _TREE] for given in (found, expected)]
                    _compare_trees(f"{name}[{slot}]", trees[0], trees[1], TOLERANCES[carrier])
                    errors.append(_error(name, ours[slot, :nodes], theirs[slot, :nodes], TOLERANCES[carrier]))
                continue
            pair = as_float(ours, spec.dtype), as_float(theirs, spec.dtype)
            errors.append(_error(name, *pair, TOLERANCES[carrier]))
    return max(errors)


def _error(name: str, ours: Array, theirs: Array, most: float) -> float:
    """The largest difference over the largest value."""
    assert np.isfinite(theirs).all(), f"{name}: the reference is not finite"
    largest = float(np.abs(theirs).max(initial=0.0)) or 1.0
    error = float(np.abs(ours - theirs).max(initial=0.0)) / largest
    assert error <= most, f"{name}: off by {error:.2g} of the largest value, at most {most:.2g} is rounding"
    return error


def _changed_rows(name: str, call: Call, after: Array, before: Array) -> Array:
    """Rows of a KV buffer [slots, H, C, D] with other bits than before, bool [slots, C]; only the call's may be."""
    bits = f"u{after.dtype.itemsize}"
    changed: Array = (after.view(bits) != before.view(bits)).any(axis=(1, 3))
    wrong = np.argwhere(changed & ~_marked(call.rows, after))
    assert not len(wrong), f"{name}: row {wrong[0][1]} of slot {wrong[0][0]} changed, which the call does not write"
    return changed


def _marked(rows: Sequence[range], buffer: Array) -> Array:
    """Rows of a KV buffer [slots, H, C, D] that are in the range of their slot, bool [slots, C]."""
    marked = np.zeros((buffer.shape[0], buffer.shape[2]), np.bool_)
    for slot, some in enumerate(rows):
        marked[slot, some.start : some.stop] = True
    return marked


def _compare_trees(name: str, ours: Sequence[Array], theirs: Sequence[Array], most: float) -> None:
    """The same nodes in the same order, but among those whose log-probabilities rounding may have swapped.

    At the cut, rounding may also have put a node in for another: both are near the last one that was kept.
    """
    paths, wanted = (_paths(tokens.tolist(), parents.tolist()) for tokens, parents, _ in (ours, theirs))
    probs = theirs[2].astype(np.float64)
    near = most * max(float(np.abs(probs).max(initial=0.0)), 1.0)
    ends = [node + 1 for node in range(len(probs) - 1) if probs[node] - probs[node + 1] > near]
    start = 0
    for end in [*ends, len(probs)]:
        same = sorted(paths[start:end]) == sorted(wanted[start:end])
        assert same or (end == len(probs) and _at_the_cut(paths, wanted, ours[2], probs, near)), (
            f"{name}: nodes {start} to {end - 1} are {paths[start:end]}, expected {wanted[start:end]}"
        )
        start = end


def _at_the_cut(
    paths: list[tuple[int, ...]], wanted: list[tuple[int, ...]], ours: Array, theirs: Array, near: float
) -> bool:
    """Whether nodes that only one of two trees has are as unlikely as the last, up to rounding.

    What the reference alone has was rounded down, and what took its place up: it may be twice as far.
    """
    ours_alone, theirs_alone = set(paths) - set(wanted), set(wanted) - set(paths)
    return all(abs(ours[paths.index(path)] - theirs[-1]) <= near for path in ours_alone) and all(
        theirs[wanted.index(path)] - theirs[-1] <= 2 * near for path in theirs_alone
    )


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class Calls:
    """Inputs for the graphs of a bundle, the same at every run."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._shape = bundle.manifest.shape
        self._lyanna = bundle.manifest.lyanna
        self._capacity = min(bundle.manifest.context, MOST_CAPACITY)
        self._random = np.random.default_rng(7)

    def of(self, graph: str, batches: Sequence[int]) -> Iterator[Call]:
        """The calls that a graph is compared in."""
        kinds: Mapping[str, Callable[[Sequence[int]], Iterator[Call]]] = {
            names.VERIFIER: self._verifier, names.LYANNA_DRAFT: self._draft, names.LYANNA_RESAMPLE: self._resample,
            names.STEP_LAYOUT: self._layout, names.STEP_ACCEPT: self._accept, names.STEP_KEEP: self._keep,
            names.STEP_COLLECT: self._collect,
        }  # fmt: skip
        if graph in kinds:
            return kinds[graph](batches)
        return self._move(graph)

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
        live = max(past) + nodes
        values = {
            names.TOKEN_IDS: self._random.integers(0, self._shape.vocabulary, parents.shape),
            names.POSITIONS: np.array(past)[:, None] + mask.sum(2) - 1,
            names.TREE_MASK: mask, names.PAST_LEN: np.array(past), names.LIVE: np.array([live]),
            names.OUTPUT_ROWS: rows,
        }  # fmt: skip
        poisoned, clean = self._caches(signatures.verifier_state(self._shape), self._capacity, past, live)
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
                live = max(past) + rows
                values = {
                    names.FEATURE_ROWS: self._floats(shape.dtype, batch, rows, shape.hidden),
                    names.TOKENS: self._random.integers(0, shape.vocabulary, (batch, rows)),
                    names.POSITIONS: np.array(past)[:, None] + np.arange(rows),
                    names.PENDING: np.array(pending[:batch]), names.PAST_LEN: np.array(past),
                    names.LIVE: np.array([live]),
                }  # fmt: skip
                state = [spec for spec in signatures.lyanna_state(shape) if spec.name.startswith(_CACHES)]
                poisoned, clean = self._caches(state, capacity, past, live + shape.steps - 1)
                written = [range(start, start + rows + shape.steps - 1) for start in past]
                left = [range(row.start + n, row.stop) for row, n in zip(written, pending[:batch], strict=True)]
                sizes = {"B": batch, "M": rows}
                values |= self._tables()
                yield Call(f"{rows} rows", sizes, {**values, **poisoned}, clean, written, left)

    def _resample(self, batches: Sequence[int]) -> Iterator[Call]:
        """After one step, and after as many as leave the last."""
        shape = self._lyanna
        assert shape is not None
        for batch in batches:
            for used in (1, shape.steps - 1):
                yield Call(f"{used} used", {"B": batch}, {
                    names.CHAIN_LOGITS: self._floats("float32", batch, shape.steps, shape.vocabulary),
                    names.FIRST_STEP: np.full(batch, used), **self._tables(),
                    names.TOKENS: self._random.integers(0, shape.vocabulary, batch),
                })  # fmt: skip

    def _layout(self, batches: Sequence[int]) -> Iterator[Call]:
        for batch in batches:
            for nodes in (1, NODES):
                for kind, on_device in (("the host's", [0, 1]), ("a drafter's", [1, 0])):
                    values = {
                        names.HOST_TOKENS: self._random.integers(0, self._shape.vocabulary, (batch, nodes)),
                        names.TREE_TOKENS: self._random.integers(0, self._shape.vocabulary, (batch, NODES)),
                        names.HOST_PARENTS: np.stack([self._parents(nodes) for _ in range(batch)]),
                        names.TREE_PARENTS: np.stack([self._parents(NODES) for _ in range(batch)]),
                        names.ON_DEVICE: np.array(on_device[:batch]),
                        names.PAST_LEN: np.array(self._lengths(batch)),
                    }
                    yield Call(f"{nodes} nodes, {kind}", {"B": batch, "T": nodes, "K": NODES}, values)

    def _accept(self, batches: Sequence[int]) -> Iterator[Call]:
        """Logits that agree with some branches of each tree; a tree of fewer nodes than the call has room for."""
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

    def _keep(self, batches: Sequence[int]) -> Iterator[Call]:
        """An accepted path with gaps, one that is in place already, in buffers of numbers."""
        for batch in batches:
            paths = np.tile(np.arange(NODES), (batch, 1))
            paths[0, 1:4] = (2, 5, 11)
            past = self._lengths(batch)
            state = signatures.verifier_state(self._shape)
            values = {spec.name: self._floats(spec.dtype, *self._cache(spec, self._capacity)) for spec in state}
            sizes = {"B": batch, "T": NODES}
            yield Call("path", sizes, {names.PATH: paths, names.PAST_LEN: np.array(past), **values})

    def _collect(self, batches: Sequence[int]) -> Iterator[Call]:
        for batch in batches:
            hidden, dtype = self._shape.hidden, self._shape.dtype
            paths = np.tile(np.arange(NODES), (batch, 1))
            paths[0, 1:4] = (2, 5, 11)
            room = names.MOST_WAITING_ROWS
            yield Call("path", {"B": batch, "F": NODES, "T": NODES, "W": room}, {
                names.FEATURE_ROWS: self._floats(dtype, batch, NODES, hidden), names.PATH: paths,
                names.WAITING: self._floats(dtype, batch, room, hidden),
                names.WAITING_ROWS: np.array([5, 17][:batch]),
            })  # fmt: skip

    def _move(self, graph: str) -> Iterator[Call]:
        verifier = graph == names.STEP_MOVE
        assert verifier or self._lyanna is not None
        state = signatures.verifier_state(self._shape) if verifier else signatures.lyanna_state(self._lyanna)  # type: ignore[arg-type]
        sizes = {"B": SLOTS, "C": self._capacity, "W": names.MOST_WAITING_ROWS}
        values = {spec.name: self._floats(spec.dtype, *_sized(spec, sizes)) for spec in state}
        for source, target in ((2, 0), (0, 1)):
            slots = {names.SOURCE_SLOT: np.array([source]), names.TARGET_SLOT: np.array([target])}
            yield Call(f"{source} to {target}", sizes, {**slots, **values})

    def _lengths(self, batch: int) -> list[int]:
        """Rows live before a call, the longest sequence first."""
        return [self._capacity // (2 + slot * 3) for slot in range(batch)]

    def _parents(self, nodes: int) -> Array:
        return np.array([-1, *(int(self._random.integers(max(0, node - 4), node)) for node in range(1, nodes))])

    def _floats(self, dtype: Dtype, *shape: int) -> Array:
        return from_float(self._random.standard_normal(shape).astype(np.float32), dtype)

    def _tables(self) -> dict[str, Array]:
        assert self._lyanna is not None
        return {spec.name: self._bundle.array(spec.name) for spec in signatures.token_info_tables(self._lyanna)}

    def _cache(self, spec: TensorSpec, capacity: int) -> tuple[int, ...]:
        return _sized(spec, {"B": SLOTS, "C": capacity})

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


def _sized(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def from_float(values: Array, dtype: Dtype) -> Array:
    """Numbers in an element type; bfloat16 as its bits, cut off."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_type(dtype))


def as_float(values: Array, dtype: Dtype) -> Array:
    """The numbers of an array of an element type."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def build_tiny(root: Path, out: Path, backend: Backend, precision: Precision, attention: Attention | None) -> Bundle:
    """The embedded model's engines and its drafter's for two sequences at once.

    Raises RedraftError: whatever is missing was asked before (`missing`).
    """
    source = root / "assets" / "tiny"
    lyanna = LyannaBuild(source=str(source / "lyanna"), precision=precision)
    config = BuildConfig(
        backend=backend, precision=precision, taps=(names.LAST_TAP,), lyanna=lyanna,
        tensorrt=TensorRtBuild(batch=2, attention=attention or "plugin"),
    )  # fmt: skip
    build_bundle(Model("tiny", str(source), source), config, out, {}, False, lambda message: None)
    return open_bundle(out, verify=False)


# --- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(lyanna_bundle: Path) -> Bundle:
    return open_bundle(lyanna_bundle, verify=False)


@pytest.fixture
def fakes(bundle: Bundle, tmp_path: Path) -> Device:
    """Engines with the profiles that a build for two sequences gives them, so that every call must fit one."""
    built, context = TensorRtBuild(batch=2), bundle.manifest.context
    limits = Limits(built.batch, min(built.tree_nodes, context), min(built.prefill, context), context)
    profiles = {
        graph: [
            {name: (sizes.min, sizes.max) for name, sizes in profile.inputs.items()}
            for profile in profiles_of(graph, bundle.graph(graph).inputs, limits, False)
        ]
        for graph in STAGED
        if graph in bundle.manifest.graphs
    }
    return tensorrt_device(bundle, tmp_path, profiles).device


@pytest.mark.parametrize("kind", ["cpu", "tensorrt"])
def test_every_graph_gives_what_the_reference_does(bundle: Bundle, fakes: Device, kind: str) -> None:
    device = fakes if kind == "tensorrt" else cpu_device(bundle)
    errors = compare_outputs(device, cpu_device(bundle), bundle)
    assert {where.partition(",")[0] for where in errors} == set(GRAPHS)
    assert {"prefill, later chunk, B=1", "one token, B=2", "tree, B=1", "tree, B=2"} <= {
        where.partition(", ")[2] for where in errors if where.startswith(f"{names.VERIFIER},")
    }
    assert all(error <= TOLERANCES["float32"] for error in errors.values())


class Faulty:
    """A device one of whose graphs is spoiled: `before` and `after` its run, with its buffers whole."""

    def __init__(self, device: Device, graph: str, before: Fault | None, after: Fault | None) -> None:
        self._device = device
        self._graph = graph
        self._faults = before, after
        self._whole: dict[int, Buffer] = {}
        self.name = device.name

    def empty(self, dtype: Dtype, *shape: int) -> Buffer:
        made = self._device.empty(dtype, *shape)
        self._whole[made.address] = made
        return made

    def inbox(self, **shapes: tuple[int, ...]) -> Inbox:
        made = self._device.inbox(**shapes)
        self._whole.update({buffer.address: buffer for buffer in made.buffers.values()})
        return made

    def program(self, graph: str) -> Program:
        program = self._device.program(graph)
        if graph != self._graph:
            return program
        bind = program.bind
        program.bind = lambda buffers: self._spoiled(bind(buffers), buffers)  # type: ignore[method-assign]
        return program

    def _spoiled(self, run: Run, buffers: Mapping[str, Buffer]) -> Run:
        whole = {name: self._whole[buffer.address] for name, buffer in buffers.items()}
        before, after = self._faults

        def spoiled() -> None:
            if before:
                before(whole)
            run()
            if after:
                after(whole)

        return spoiled


Fault = Callable[[Mapping[str, Buffer]], None]
KEY = names.key_cache(0)


def changed(name: str, place: tuple[int, ...], by: float = 1) -> Fault:
    """Adds to one value of a buffer."""

    def change(buffers: Mapping[str, Buffer]) -> None:
        values = buffers[name].read()
        values[place] += by
        buffers[name].write(values)

    return change


def put(name: str, place: tuple[int, ...], value: float) -> Fault:
    """Sets one value of a buffer."""

    def change(buffers: Mapping[str, Buffer]) -> None:
        values = buffers[name].read()
        values[place] = value
        buffers[name].write(values)

    return change


def past_end(buffers: Mapping[str, Buffer]) -> None:
    """A row behind what the call reads, which is NaN: written with other bits of the same meaning."""
    values = buffers[KEY].read()
    values.view(np.uint32)[0, 0, -1, 0] ^= 1
    buffers[KEY].write(values)


def unwritten(buffers: Mapping[str, Buffer]) -> None:
    """The last of the new rows stays as it was."""
    values, last = buffers[KEY].read(), int(buffers[names.LIVE].read()[0]) - 1
    values[0, :, last] = STALE["float32"]
    buffers[KEY].write(values)


def swapped(buffers: Mapping[str, Buffer]) -> None:
    """The likeliest two children of a tree change places, their probabilities do not."""
    values = buffers[names.TREE_TOKENS].read()
    values[:, [1, 2]] = values[:, [2, 1]]
    buffers[names.TREE_TOKENS].write(values)


@pytest.mark.parametrize(
    ("graph", "before", "after", "message"),
    [
        (names.VERIFIER, None, changed(names.LOGITS, (0, 0, 3), 0.01), "prefill, first chunk, B=1: logits: off by"),
        (names.VERIFIER, None, changed(names.features("last"), (-1, -1, 0), np.nan), "features.last: off by nan"),
        (names.VERIFIER, None, put(KEY, (0, 0, -1, 0), 1.0), "row 95 of slot 0 changed"),
        (names.VERIFIER, None, put(KEY, (2, 0, 0, 0), 1.0), "row 0 of slot 2 changed"),
        (names.VERIFIER, None, past_end, "row 95 of slot 0 changed"),
        (names.VERIFIER, None, unwritten, "other rows were written"),
        (names.VERIFIER, put(names.TREE_MASK, (0, -1, 0), False), None, "features.last: off by"),
        (names.VERIFIER, None, put(KEY, (0, 0, 0, 0), 50.0), "kv.0.key.present: off by"),
        (names.LYANNA_DRAFT, changed(names.PENDING, (0,)), None, "lyanna.draft, 16 rows, B=1"),
        (names.LYANNA_DRAFT, None, changed(names.CHAIN_LOGITS, (0, -1, 0), 0.1), "chain_logits: off by"),
        (names.LYANNA_DRAFT, None, swapped, r"nodes \d+ to \d+ are"),
        (names.LYANNA_RESAMPLE, None, changed(names.TREE_PARENTS, (0, 4), -1), "lyanna.resample, 1 used, B=1"),
        (names.LYANNA_RESAMPLE, None, changed(names.TREE_COUNT, (0,)), "tree.count: expected the same bits"),
        (names.STEP_LAYOUT, None, changed(names.POSITIONS, (0, -1)), "positions: expected the same bits"),
        (names.STEP_ACCEPT, None, changed(names.VERDICT, (0, -1)), "verdict: expected the same bits"),
        (names.STEP_KEEP, None, changed(KEY, (2, 0, 0, 0)), "kv.0.key.present: expected the same bits"),
        (names.STEP_COLLECT, None, changed(names.WAITING, (0, 0, 0)), "waiting.present: expected the same bits"),
        (names.STEP_MOVE, changed(names.SOURCE_SLOT, (0,), -1), None, "step.move, 2 to 0"),
        (names.LYANNA_MOVE, None, changed(names.CHAIN_LOGITS, (1, 0, 0)), "lyanna.move, 2 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_seen(bundle: Bundle, graph: str, before: Fault | None, after: Fault | None, message: str) -> None:
    faulty = Faulty(cpu_device(bundle), graph, before, after)
    with pytest.raises(AssertionError, match=message):
        compare_outputs(faulty, cpu_device(bundle), bundle, [graph])  # type: ignore[arg-type]


SPACED = ([0, *range(1, 13)], [-1, *[0] * 12], [0.0, *(-0.5 - 0.05 * node for node in range(12))])
"""A root and twelve children, each nearer to the next than bf16 rounds."""


def with_tokens(tree: tuple[list[int], list[int], list[float]], changes: Mapping[int, int]) -> list[Array]:
    tokens, parents, probs = tree
    return [
        np.array([changes.get(node, token) for node, token in enumerate(tokens)]),
        np.array(parents), np.array(probs, np.float32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({3: 4, 4: 3}, None),
        ({12: 99}, None),
        ({node: 100 + node for node in range(1, 13)}, "nodes 1 to 12 are"),
        ({1: 99}, "nodes 1 to 12 are"),
        ({1: 12}, "nodes 1 to 12 are"),
    ],
    ids=["same", "swapped", "another over the cut", "all wrong", "the likeliest wrong", "one twice"],
)
def test_only_nodes_at_the_cut_may_be_others(changes: Mapping[int, int], message: str | None) -> None:
    """All twelve are one group, the last: no gap is larger than rounding."""
    ours, theirs = with_tokens(SPACED, changes), with_tokens(SPACED, {})
    if message is None:
        _compare_trees("tree", ours, theirs, TOLERANCES["bfloat16"])
        return
    with pytest.raises(AssertionError, match=message):
        _compare_trees("tree", ours, theirs, TOLERANCES["bfloat16"])


def test_the_embedded_model_is_built_for_two_sequences(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests on a GPU build: with fewer, opening two slots is refused, and nothing would be tested."""
    asked: list[BuildConfig] = []
    monkeypatch.setattr(
        "tests.engines.test_gpu_outputs.build_bundle", lambda model, config, *rest: asked.append(config)
    )
    monkeypatch.setattr("tests.engines.test_gpu_outputs.open_bundle", lambda path, verify: None)
    for attention in ("plugin", "native", None):
        build_tiny(root, tmp_path / "tiny", "tensorrt", "fp16", attention)
    assert [config.tensorrt.batch for config in asked] == [2, 2, 2]
    assert [config.tensorrt.attention for config in asked] == ["plugin", "native", "plugin"]
    assert all(config.lyanna is not None for config in asked), "both compute the drafter's attention too"
    assert {config.taps for config in asked} == {(names.LAST_TAP,)}, "the verifiers of both must give the same outputs"
    assert asked[0].tensorrt.tree_nodes >= NODES
    assert asked[0].tensorrt.prefill >= CHUNK


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_a_gpu_gives_what_the_cpu_does(root: Path, tmp_path: Path, backend: Backend, precision: Precision) -> None:
    """CUDA, and TensorRT's engines with the plugin, against the same bundle's portable graphs on the CPU."""
    if reason := missing(backend):
        pytest.skip(reason)
    bundle = build_tiny(root, tmp_path / "tiny", backend, precision, None)
    print(compare_outputs(open_device(bundle, "cuda"), HostDevice(bundle), bundle))
