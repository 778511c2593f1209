"""Lyanna on a device: the same graphs as `lyanna.py`, over buffers that the verifier's programs fill and read.

Feature rows go from the verifier to where they wait, and trees from the drafter to the verifier, without the host: it
knows how many rows wait and how many steps are left, which is all that choosing needs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.engines.base import Array
from redraft.engines.device import Buffer, Device, Program, Run, byte_size, sized
from redraft.engines.tensorrt.profiles import check_tree
from redraft.errors import UsageError
from redraft.methods.lyanna import METHOD, LyannaOptions, LyannaShape, resample_nodes, slot_state, tree_size
from redraft.names import COPY_SLOT, DRAFT, RESAMPLE, drafter_graph
from redraft.runtime.bound_step import SlotMove, leading
from redraft.runtime.device_tree import DeviceTrees
from redraft.runtime.device_verifier import DeviceVerifier
from redraft.runtime.drafters.base import Drafter, OpenEngine
from redraft.runtime.drafters.lyanna import CATCH_UP
from redraft.runtime.ranges import WAIT
from redraft.runtime.sequence import Sequence
from redraft.runtime.verifier import Features, Verifier
from redraft.types import Budget, DraftTree, Outcome

_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)


@dataclass(slots=True)
class Pending:
    """Of one sequence: rows in the drafter's KV, rows that wait, steps used of the last draft."""

    used: int
    cache_len: int = 0
    rows: int = 0


class DeviceLyanna(Drafter):
    """See the module. A step drafts for the whole batch or for none of it: rows that wait go in either way."""

    has_engines = True
    for_all = True

    def __init__(
        self, verifier: DeviceVerifier, shape: LyannaShape, tables: Mapping[str, Array], config: LyannaOptions,
        name: str = METHOD.id,
    ) -> None:  # fmt: skip
        super().__init__(verifier)
        self.config = config
        self.name = name
        self.shape = shape
        device = self._device = verifier.device
        room = names.MAX_PENDING_FEATURES
        sizes = {"B": verifier.max_num_seqs, "C": verifier.max_model_len + CATCH_UP + shape.steps, "W": room}
        state = {spec.name: byte_size(spec.dtype, sized(spec.shape, sizes)) for spec in slot_state(shape)}
        graphs = (DRAFT, *((RESAMPLE,) if shape.steps > 1 else ()))
        device.expect({
            "drafter's KV, chain and pending rows": sum(state.values()),
            "token information": sum(table.nbytes for table in tables.values()),
        }, (*(drafter_graph(name, role) for role in graphs), names.STEP_GATHER_FEATURES))  # fmt: skip
        self._programs = {role: device.program(drafter_graph(name, role)) for role in graphs}
        self._collect = device.program(names.STEP_GATHER_FEATURES)
        self._state = {spec.name: device.empty(spec.dtype, *sized(spec.shape, sizes)) for spec in slot_state(shape)}
        self._tables = {name: _placed(device, table) for name, table in tables.items()}
        self._positions = np.arange(sizes["C"])
        self._calls: dict[tuple[str, int, int], _Call] = {}
        self._trees: dict[tuple[str, int], dict[str, Buffer]] = {}
        self._shifts: dict[int, _Shift] = {}
        self._copy_slot = SlotMove(device, drafter_graph(name, COPY_SLOT), self._state)
        verifier.attach(self)
        if device.asynchronous:
            self._warm(verifier)

    @classmethod
    def create(cls, verifier: Verifier, options: Mapping[str, Any], engines: OpenEngine | None = None) -> Self:
        """Return the bundle's drafter, with options as `LyannaOptions`. Raises UsageError, BundleError."""
        assert engines is not None
        assert isinstance(verifier, DeviceVerifier)
        built = engines.built()
        check_tree(verifier.largest_tree, built.shape.nodes)
        config = METHOD.parse_options(options)
        return cls(verifier, built.shape, engines.bundle.tables(built.id), config, built.id)

    def bind(self, features: Mapping[str, Buffer], path: Buffer, start: Buffer) -> Run:
        """See `Collector.bind`."""
        sequences, rows = path.shape
        if rows > (most := names.MAX_PENDING_FEATURES - CATCH_UP):
            raise UsageError(f"a tree of {rows} nodes is too large, at most {most} can be", "lower the budget's nodes")
        pending = leading(self._state[names.PENDING_FEATURES], sequences)
        return collected(self._collect, features[names.hidden_states(names.LAST_HIDDEN_STATE)], path, pending, start)

    def pending(self, batch: Several[Sequence]) -> list[int]:
        """See `Collector.pending`. Where others draft for the batch, what waits for them is not kept."""
        for seq in batch:
            if not isinstance(seq.drafting, Pending):
                return [0] * len(batch)
        while max(rows := [seq.drafting.rows for seq in batch]) > CATCH_UP:
            self._catch_up(batch)
        return rows

    def begin(self, seq: Sequence) -> None:
        """See `Drafter.begin`."""
        seq.drafting = Pending(used=self.shape.steps)

    def prefilled(self, seq: Sequence, start: int, features: Features) -> None:
        """See `Drafter.prefilled`."""
        seq.drafting.rows += len(features[names.LAST_HIDDEN_STATE])
        while seq.drafting.rows > CATCH_UP:
            self._catch_up([seq])

    def accept(self, seq: Sequence, tree: DraftTree, outcome: Outcome, features: Features) -> None:
        """See `Drafter.accept`; the rows are there already."""
        pending: Pending = seq.drafting
        pending.rows += 1 + len(outcome.path)
        pending.used += 1 + len(outcome.path)

    def remaining(self, seq: Sequence) -> int:
        """See `Drafter.remaining`."""
        left: int = self.shape.steps - seq.drafting.used
        return left if self.config.resample and left > self.config.threshold else 0

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.draft`. Trees are as deep and wide as they are made: the budget says how many of their nodes."""
        while max(rows := [seq.drafting.rows for seq in batch]) > CATCH_UP:
            self._catch_up(batch)
        call = self._draft(batch, rows)
        for seq in batch:
            seq.drafting.used = 0
        return call.trees(budgets, [self.shape.nodes] * len(batch), "draft")

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.resample`."""
        call = self._call(RESAMPLE, len(batch), 0)
        used = [seq.drafting.used if budget.nodes else 1 for seq, budget in zip(batch, budgets, strict=True)]
        values = call.host_inputs.open()
        values[names.FIRST_STEP][:] = used
        values[names.TOKENS][:] = [seq.tokens[-1] for seq in batch]
        self._run(RESAMPLE, call)
        nodes = resample_nodes(self.shape)
        left = [min(tree_size(self.shape.steps - steps, self.shape.width), nodes) for steps in used]
        return call.trees(budgets, left, "resample")

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """See `Drafter.move`."""
        self._copy_slot(source, target)

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """See `Drafter.measure_ms`."""
        call = self._call(DRAFT, 1, names.DRAFT_WIDTHS[0])
        self._fill_rows(call, [rows], [min(kv_len, self.verifier.max_model_len - names.DRAFT_WIDTHS[0])])
        drafted = self._measured(call)
        if self.shape.steps == 1:
            return drafted, 0.0
        again = self._call(RESAMPLE, 1, 0)
        again.host_inputs.open()[names.FIRST_STEP][:] = 1
        return drafted, self._measured(again)

    def _measured(self, call: _Call) -> float:
        """Milliseconds of a run, until it is done."""
        self._device.wait()
        started = time.perf_counter()
        call.work()
        self._device.wait()
        return (time.perf_counter() - started) * 1e3

    def _warm(self, verifier: DeviceVerifier) -> None:
        """Run every call, and the verification of what it makes, until it is replayed as a graph."""
        verifier.warm()
        for sequences in sorted({1, verifier.max_num_seqs}, reverse=True):
            calls = [(DRAFT, width) for width in names.DRAFT_WIDTHS]
            calls += [(RESAMPLE, 0)] if RESAMPLE in self._programs else []
            for graph, width in calls:
                call = self._call(graph, sequences, width)
                for _ in range(2):
                    if graph == DRAFT:
                        self._fill_rows(call, [1] * sequences, [0] * sequences)
                    else:
                        call.host_inputs.open()[names.FIRST_STEP][:] = 1
                    call.work()
                    self._device.wait()
                if width != CATCH_UP:
                    verifier.warm_trees(sequences, call.made(""))

    def _catch_up(self, batch: Several[Sequence]) -> None:
        """Take in at most CATCH_UP rows of every sequence, and bring the rest forward. Chains are lost."""
        rows = [min(seq.drafting.rows, CATCH_UP) for seq in batch]
        self._draft(batch, rows)
        for seq in batch:
            seq.drafting.used = self.shape.steps
        shift = self._shifts.get(len(batch))
        if shift is None:
            shift = self._shifts[len(batch)] = _Shift(self._device, self._collect, self._pending(len(batch)))
        shift(rows)

    def _draft(self, batch: Several[Sequence], rows: Several[int]) -> _Call:
        """One call that takes in the first rows[i] pending rows of sequence i."""
        width = names.DRAFT_WIDTHS[bisect_left(names.DRAFT_WIDTHS, max(rows))]
        call = self._call(DRAFT, len(batch), width)
        states: list[Pending] = [seq.drafting for seq in batch]
        values = self._fill_rows(call, rows, [state.cache_len for state in states])
        tokens = values[names.TOKENS]
        for slot, (seq, state, count) in enumerate(zip(batch, states, rows, strict=True)):
            start = state.cache_len + 1
            tokens[slot, :count] = seq.tokens[start : start + count]
            state.cache_len += count
            state.rows -= count
        self._run(DRAFT, call)
        return call

    def _fill_rows(self, call: _Call, rows: Several[int], cache_len: Several[int]) -> Mapping[str, Array]:
        """Where the next draft's rows lie, and how many there are; what is left to fill in are their tokens."""
        values = call.host_inputs.open()
        positions, pending, lengths = values[names.POSITIONS], values[names.NUM_PENDING], values[names.CACHE_LEN]
        for slot, start in enumerate(cache_len):
            positions[slot] = self._positions[start : start + call.width]
            pending[slot] = rows[slot] or 1
            lengths[slot] = start
        values[names.KV_LEN][0] = max(cache_len) + call.width
        return values

    def _run(self, graph: str, call: _Call) -> None:
        ranges = self.verifier.ranges
        with ranges.call(drafter_graph(self.name, graph)):
            call.work()
            if ranges.watcher is not None and ranges.watcher.waits:
                with ranges.stage(WAIT):
                    self._device.wait()

    def _pending(self, sequences: int) -> Buffer:
        return leading(self._state[names.PENDING_FEATURES], sequences)

    def _call(self, graph: str, sequences: int, width: int) -> _Call:
        key = (graph, sequences, width)
        if key not in self._calls:
            held = {
                name: leading(buffer, sequences)
                for name, buffer in self._state.items()
                if name != names.PENDING_FEATURES
            }
            program = self._programs[graph]
            trees = self._trees.setdefault((graph, sequences), {})
            call = _Call(self._device, program, {"B": sequences, "M": width}, {**held, **self._tables, **trees})
            trees.update(call.tree_buffers)  # of calls of all widths, so that one verification does for them
            if graph == DRAFT:
                call.gather(self._collect, self._pending(sequences))
            self._calls[key] = call
        return self._calls[key]


class _Call:
    """One shape of a drafter's program: buffers of its own beside those `given`, and the work that runs it."""

    def __init__(self, device: Device, program: Program, sizes: Mapping[str, int], given: Mapping[str, Buffer]) -> None:
        self._device = device
        known = dict(given)
        shapes = {
            spec.name: sized(spec.shape, sizes)
            for spec in program.inputs
            if spec.dtype == "int64" and spec.name not in given
        }
        self.host_inputs = device.host_inputs(**shapes)
        self.width = sizes["M"]
        known |= self.host_inputs.buffers
        for spec in (*program.inputs, *program.outputs):
            if spec.name not in known:
                other = known.get(spec.in_place_of) if spec.in_place_of else None
                known[spec.name] = other or device.empty(spec.dtype, *sized(spec.shape, sizes))
        self._buffers = {spec.name: known[spec.name] for spec in (*program.inputs, *program.outputs)}
        self.tree_buffers = {name: known[name] for name in _TREE}
        self._tokens, self._parents, self._log_probs = (known[name] for name in _TREE)
        self._run = program.bind(self._buffers)
        self.work = device.chain([self.host_inputs.send, self._run])

    def gather(self, collect: Program, pending: Buffer) -> None:
        """Take the first rows that wait before every run."""
        rows = self._buffers[names.FEATURE_ROWS]
        sequences, width = rows.shape[:2]
        path, start = self._device.empty("int64", sequences, width), self._device.empty("int64", sequences)
        path.write(np.tile(np.arange(width), (sequences, 1)))
        taken = collected(collect, pending, path, rows, start)
        self.work = self._device.chain([self.host_inputs.send, taken, self._run])

    def made(self, stage: str) -> DeviceTrees:
        """The trees of the latest run, made in this stage of a step."""
        return DeviceTrees(self._tokens, self._parents, self._log_probs, self.work, stage)

    def trees(self, budgets: Several[Budget], nodes: Several[int], stage: str) -> list[DraftTree]:
        """The trees of the latest run, of which `nodes` nodes exist, cut to the budgets' nodes."""
        made = self.made(stage)
        return [
            made.tree(slot, min(count, 1 + budget.nodes))
            for slot, (budget, count) in enumerate(zip(budgets, nodes, strict=True))
        ]


class _Shift:
    """Brings the rows that still wait to the front."""

    def __init__(self, device: Device, collect: Program, pending: Buffer) -> None:
        sequences, room = pending.shape[0], pending.shape[1] - CATCH_UP
        self._columns = np.arange(room)
        self._host_inputs = device.host_inputs(**{names.PATH: (sequences, room), names.PENDING_OFFSET: (sequences,)})
        path, start = (self._host_inputs.buffers[name] for name in (names.PATH, names.PENDING_OFFSET))
        self._work = device.chain([self._host_inputs.send, collected(collect, pending, path, pending, start)])

    def __call__(self, gone: Several[int]) -> None:
        """The first gone[i] rows of sequence i went in."""
        self._host_inputs.open()[names.PATH][:] = self._columns + np.array(gone)[:, None]
        self._work()


def collected(collect: Program, features: Buffer, path: Buffer, pending: Buffer, start: Buffer) -> Run:
    """What writes features[b, path[b, i]] to pending[b, start[b] + i]."""
    return collect.bind({
        names.FEATURE_ROWS: features, names.PATH: path, names.PENDING_FEATURES: pending, names.PENDING_OFFSET: start,
        names.present(names.PENDING_FEATURES): pending,
    })  # fmt: skip


def _placed(device: Device, table: Array) -> Buffer:
    buffer = device.empty(str(table.dtype), *table.shape)  # type: ignore[arg-type]
    buffer.write(table)
    return buffer


DRAFTER = DeviceLyanna
