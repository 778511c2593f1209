"""Lyanna on a device: the same graphs as `lyanna.py`, over buffers that the verifier's programs fill and read.

Feature rows go from the verifier to where they wait, and trees from the drafter to the verifier, without the host: it
knows how many rows wait and how many steps are left, which is all that choosing needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.config import from_mapping
from redraft.engines.base import Array
from redraft.engines.device import Buffer, Device, Program, Run, byte_size
from redraft.engines.tensorrt.profiles import check_tree
from redraft.errors import UsageError
from redraft.names import LyannaShape, TensorSpec
from redraft.runtime.device_frame import SlotMove, leading
from redraft.runtime.device_tree import DeviceTrees
from redraft.runtime.device_verifier import DeviceVerifier
from redraft.runtime.drafters.base import Drafter, OpenEngine
from redraft.runtime.drafters.lyanna import CATCH_UP, LyannaConfig
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import Features, Verifier
from redraft.types import Budget, DraftTree, Outcome

WIDTHS = (16, CATCH_UP)
"""Rows that a draft call has room for: few in a step, many after a prompt."""


@dataclass(slots=True)
class Waiting:
    """Of one sequence: rows in the drafter's KV, rows that wait, steps used of the last draft."""

    used: int
    past_len: int = 0
    rows: int = 0


class DeviceLyanna(Drafter):
    """See the module. A step drafts for the whole batch or for none of it: rows that wait go in either way."""

    has_engines = True

    def __init__(
        self, verifier: DeviceVerifier, shape: LyannaShape, tables: Mapping[str, Array], config: LyannaConfig
    ) -> None:
        super().__init__(verifier)
        self.config = config
        self.beside_lookup = config.lookup
        self.shape = shape
        device = self._device = verifier.device
        graphs = (names.LYANNA_DRAFT, *((names.LYANNA_RESAMPLE,) if shape.steps > 1 else ()))
        self._programs = {name: device.program(name) for name in graphs}
        self._collect = device.program(names.STEP_COLLECT)
        room = names.MOST_WAITING_ROWS
        sizes = {"B": verifier.slots, "C": verifier.capacity + CATCH_UP + shape.steps, "W": room}
        state = {spec.name: byte_size(spec.dtype, _sized(spec, sizes)) for spec in names.lyanna_state(shape)}
        device.expect({
            "drafter's KV, chain and waiting rows": sum(state.values()),
            "token information": sum(table.nbytes for table in tables.values()),
        })  # fmt: skip
        self._state = {spec.name: device.empty(spec.dtype, *_sized(spec, sizes)) for spec in names.lyanna_state(shape)}
        self._tables = {name: _placed(device, table) for name, table in tables.items()}
        self._calls: dict[tuple[str, int, int], _Call] = {}
        self._shifts: dict[int, _Shift] = {}
        self._targets = {b: device.empty("int64", b) for b in range(1, verifier.slots + 1)}
        self._copy_slot = SlotMove(device, names.LYANNA_MOVE, self._state)
        verifier.attach(self)

    @classmethod
    def create(cls, verifier: Verifier, options: Mapping[str, Any], engines: OpenEngine | None = None) -> Self:
        """The drafter of the bundle, with options as `LyannaConfig`. Raises UsageError, BundleError."""
        config = from_mapping(LyannaConfig, options, "lyanna")
        shape = engines.bundle.manifest.lyanna if engines else None
        if engines is None or shape is None:
            raise UsageError("this bundle has no Lyanna drafter", "build it with `redraft build MODEL --lyanna DIR`")
        assert isinstance(verifier, DeviceVerifier)
        check_tree(verifier.largest_tree, shape.nodes)
        tables = {spec.name: engines.bundle.array(spec.name) for spec in names.token_info_tables(shape)}
        return cls(verifier, shape, tables, config)

    def bind(self, features: Mapping[str, Buffer], path: Buffer) -> Run:
        """See `Collector.bind`."""
        sequences, rows = path.shape
        if rows > (most := names.MOST_WAITING_ROWS - CATCH_UP):
            raise UsageError(f"a tree of {rows} nodes is too large, at most {most} can be", "lower the budget's nodes")
        waiting = leading(self._state[names.WAITING], sequences)
        return collected(
            self._collect, features[names.features(names.LAST_TAP)], path, waiting, self._targets[sequences]
        )

    def announce(self, batch: Several[Sequence]) -> None:
        """See `Collector.announce`. Where others draft for the batch, what waits for them is not kept."""
        ours = all(isinstance(seq.drafting, Waiting) for seq in batch)
        while ours and any(seq.drafting.rows > CATCH_UP for seq in batch):
            self._catch_up(batch)
        self._targets[len(batch)].write(np.array([seq.drafting.rows if ours else 0 for seq in batch]))

    def begin(self, seq: Sequence) -> None:
        """See `Drafter.begin`."""
        seq.drafting = Waiting(used=self.shape.steps)

    def prefilled(self, seq: Sequence, start: int, features: Features) -> None:
        """See `Drafter.prefilled`."""
        seq.drafting.rows += len(features[names.LAST_TAP])
        while seq.drafting.rows > CATCH_UP:
            self._catch_up([seq])

    def accept(self, seq: Sequence, tree: DraftTree, outcome: Outcome, features: Features) -> None:
        """See `Drafter.accept`; the rows are there already."""
        waiting: Waiting = seq.drafting
        waiting.rows += 1 + len(outcome.path)
        waiting.used += 1 + len(outcome.path)

    def remaining(self, seq: Sequence) -> int:
        """See `Drafter.remaining`."""
        left: int = self.shape.steps - seq.drafting.used
        return left if self.config.resample and left > self.config.threshold else 0

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.draft`. Trees are whole: a device verifies all their nodes at once or none."""
        while any(seq.drafting.rows > CATCH_UP for seq in batch):
            self._catch_up(batch)
        call = self._draft(batch, [seq.drafting.rows for seq in batch])
        for seq in batch:
            seq.drafting.used = 0
        return call.trees(batch, budgets, [self.shape.nodes] * len(batch))

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.resample`."""
        call = self._call(names.LYANNA_RESAMPLE, len(batch), 0)
        wanted = [bool(budget.nodes) for budget in budgets]
        used = [seq.drafting.used if yes else 1 for seq, yes in zip(batch, wanted, strict=True)]
        call.write(names.FIRST_STEP, used)
        call.write(names.TOKENS, [seq.tokens[-1] for seq in batch])
        with self.verifier.ranges.call(names.LYANNA_RESAMPLE):
            call.run()
        nodes = names.resample_nodes(self.shape)
        left = [min(names.tree_size(self.shape.steps - steps, self.shape.width), nodes) for steps in used]
        return call.trees(batch, budgets, left)

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """See `Drafter.move`."""
        self._copy_slot(source, target)

    def measure_ms(self, rows: int, live: int) -> tuple[float, float]:
        """See `Drafter.measure_ms`."""
        call = self._call(names.LYANNA_DRAFT, 1, WIDTHS[0])
        past_len = min(live, self.verifier.capacity - WIDTHS[0])
        call.write(names.PENDING, [rows])
        call.write(names.PAST_LEN, [past_len])
        call.write(names.LIVE, [past_len + WIDTHS[0]])
        call.write(names.POSITIONS, np.arange(past_len, past_len + WIDTHS[0]))
        drafted = call.measure_ms()
        if self.shape.steps == 1:
            return drafted, 0.0
        again = self._call(names.LYANNA_RESAMPLE, 1, 0)
        again.write(names.FIRST_STEP, [1])
        return drafted, again.measure_ms()

    def _catch_up(self, batch: Several[Sequence]) -> None:
        """Take in at most CATCH_UP rows of every sequence, and bring the rest forward. Chains are lost."""
        rows = [min(seq.drafting.rows, CATCH_UP) for seq in batch]
        self._draft(batch, rows)
        for seq in batch:
            seq.drafting.used = self.shape.steps
        shift = self._shifts.get(len(batch))
        if shift is None:
            shift = self._shifts[len(batch)] = _Shift(self._device, self._collect, self._waiting(len(batch)))
        shift(rows)

    def _draft(self, batch: Several[Sequence], rows: Several[int]) -> _Call:
        """One call that takes in the first rows[i] waiting rows of sequence i."""
        width = next(width for width in WIDTHS if max(rows) <= width)
        call = self._call(names.LYANNA_DRAFT, len(batch), width)
        states: list[Waiting] = [seq.drafting for seq in batch]
        starts = np.array([state.past_len for state in states])
        tokens = np.zeros((len(batch), width), np.int64)
        for slot, (seq, start, count) in enumerate(zip(batch, starts.tolist(), rows, strict=True)):
            tokens[slot, :count] = seq.tokens[start + 1 : start + 1 + count]
        call.write(names.TOKENS, tokens)
        call.write(names.POSITIONS, starts[:, None] + np.arange(width))
        call.write(names.PENDING, [max(count, 1) for count in rows])
        call.write(names.PAST_LEN, starts)
        call.write(names.LIVE, [int(starts.max()) + width])
        with self.verifier.ranges.call(names.LYANNA_DRAFT):
            call.run()
        for state, count in zip(states, rows, strict=True):
            state.past_len += count
            state.rows -= count
        return call

    def _waiting(self, sequences: int) -> Buffer:
        return leading(self._state[names.WAITING], sequences)

    def _call(self, graph: str, sequences: int, width: int) -> _Call:
        key = (graph, sequences, width)
        if key not in self._calls:
            held = {name: leading(buffer, sequences) for name, buffer in self._state.items() if name != names.WAITING}
            program = self._programs[graph]
            call = _Call(self._device, program, {"B": sequences, "M": width}, {**held, **self._tables})
            if graph == names.LYANNA_DRAFT:
                call.gather(self._collect, self._waiting(sequences))
            self._calls[key] = call
        return self._calls[key]


class _Call:
    """One shape of a drafter's program: buffers of its own beside those `given`, and what runs it."""

    def __init__(self, device: Device, program: Program, sizes: Mapping[str, int], given: Mapping[str, Buffer]) -> None:
        self._device = device
        specs = (*program.inputs, *program.outputs)
        self._buffers: dict[str, Buffer] = {}
        for spec in specs:
            known = self._buffers.get(spec.in_place_of) if spec.in_place_of else given.get(spec.name)
            self._buffers[spec.name] = known or device.empty(spec.dtype, *_sized(spec, sizes))
        self.run = program.bind(self._buffers)
        trees = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)
        self._tokens, self._parents, self._log_probs = (self._buffers[name] for name in trees)

    def gather(self, collect: Program, waiting: Buffer) -> None:
        """Take the first rows that wait before every run."""
        rows = self._buffers[names.FEATURE_ROWS]
        sequences, width = rows.shape[:2]
        path, start = self._device.empty("int64", sequences, width), self._device.empty("int64", sequences)
        path.write(np.tile(np.arange(width), (sequences, 1)))
        self.run = self._device.chain([collected(collect, waiting, path, rows, start), self.run])

    def write(self, name: str, values: Array | Several[int]) -> None:
        """Copy integers to an input."""
        buffer = self._buffers[name]
        buffer.write(np.asarray(values, np.int64).reshape(buffer.shape))

    def trees(self, batch: Several[Sequence], budgets: Several[Budget], nodes: Several[int]) -> list[DraftTree]:
        """The trees of the latest run; the root alone where none is wanted or what may be verified has no room."""
        made = DeviceTrees(self._tokens, self._parents, self._log_probs)
        return [
            made.tree(slot, count) if budget.nodes >= count - 1 > 0 else root_only(seq.tokens[-1])
            for slot, (seq, budget, count) in enumerate(zip(batch, budgets, nodes, strict=True))
        ]

    def measure_ms(self) -> float:
        """Milliseconds of a run, until it is done."""
        self._tokens.read()
        started = time.perf_counter()
        self.run()
        self._tokens.read()
        return (time.perf_counter() - started) * 1e3


class _Shift:
    """Brings the rows that still wait to the front."""

    def __init__(self, device: Device, collect: Program, waiting: Buffer) -> None:
        self._room = waiting.shape[1] - CATCH_UP
        self._path = device.empty("int64", waiting.shape[0], self._room)
        self._run = collected(collect, waiting, self._path, waiting, device.empty("int64", waiting.shape[0]))

    def __call__(self, gone: Several[int]) -> None:
        """The first gone[i] rows of sequence i went in."""
        self._path.write(np.arange(self._room) + np.array(gone)[:, None])
        self._run()


def collected(collect: Program, features: Buffer, path: Buffer, waiting: Buffer, start: Buffer) -> Run:
    """What writes features[b, path[b, i]] to waiting[b, start[b] + i]."""
    return collect.bind({
        names.FEATURE_ROWS: features, names.PATH: path, names.WAITING: waiting, names.WAITING_ROWS: start,
        names.present(names.WAITING): waiting,
    })  # fmt: skip


def _sized(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def _placed(device: Device, table: Array) -> Buffer:
    buffer = device.empty(str(table.dtype), *table.shape)  # type: ignore[arg-type]
    buffer.write(table)
    return buffer
