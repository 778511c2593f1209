"""Drafters that read hidden states of the verifier and draft by one engine call: what their methods share.

The drafter has its own KV. Its rows are pairs of the verifier's feature at a position and the token after it; those of
tokens committed since the last draft are pending, and go in with the next one, in chunks if there are many. The
verifier gathers them in this drafter's buffers. On a GPU trees stay there, and the host knows only how many nodes they
have.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.device import Array, Buffer, Device, Program, byte_size, sized
from redraft.engines.host_buffer import array_of
from redraft.engines.tensorrt.profiles import check_tree
from redraft.errors import UsageError
from redraft.methods import Method
from redraft.names import COPY_SLOT, DRAFT, RESAMPLE, drafter_graph
from redraft.runtime.bound_step import gathered, leading, slot_copy
from redraft.runtime.device_tree import DeviceTrees
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.ranges import WAIT
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, DraftTree, Outcome

CATCH_UP = names.CATCH_UP_ROWS
_ROW_STEP = 16
"""More rows than this are padded to a multiple of it on the host, so that few shapes are prepared."""


@dataclass(slots=True)
class Drafting:
    """Of one sequence: steps used of the last draft, rows in the drafter's KV, and rows that are pending."""

    used: int
    cache_len: int = 0
    pending: int = 0


class HiddenStateDrafter(TreeMaker):
    """See the module. A method's class sets `method`; its shape has `steps` of a draft and `nodes` of its tree."""

    has_engines = True
    method: ClassVar[Method[Any]]

    def __init__(self, verifier: Verifier, shape: Any, tables: Mapping[str, Array], options: Any, name: str) -> None:
        """Load its programs. Raises BundleError, and BackendError if they do not fit the device.

        shape: of its graphs.   tables: by name.   options: those of the method.   name: the drafter's id.
        """
        super().__init__(verifier)
        self.options = options
        self.name = name
        self.shape = shape
        device = self._device = verifier.device
        self.for_all = device.step_graphs
        sizes = {
            "B": verifier.max_num_seqs,
            "C": verifier.max_model_len + CATCH_UP + shape.steps,
            "W": names.MAX_PENDING_FEATURES,
        }
        state = {spec.name: byte_size(spec.dtype, sized(spec.shape, sizes)) for spec in self.method.state(shape)}
        graphs = tuple(self.method.roles(shape))
        device.expect({
            "drafter's KV and pending rows": sum(state.values()),
            "drafter's tables": sum(table.nbytes for table in tables.values()),
        }, (*(drafter_graph(name, role) for role in graphs), names.STEP_GATHER_FEATURES))  # fmt: skip
        self._programs = {role: device.program(drafter_graph(name, role), short=role == RESAMPLE) for role in graphs}
        self._gather = device.program(names.STEP_GATHER_FEATURES)
        self._state = {
            spec.name: device.empty(spec.dtype, *sized(spec.shape, sizes)) for spec in self.method.state(shape)
        }
        self._tables = {name: _placed(device, table) for name, table in tables.items()}
        self._positions = np.arange(sizes["C"])
        self._calls: dict[tuple[str, int, int], _Call] = {}
        self._trees: dict[tuple[str, int], dict[str, Buffer]] = {}
        self._shifts: dict[int, _Shift] = {}
        self._copy_slot = slot_copy(device, drafter_graph(name, COPY_SLOT), self._state)
        verifier.attach(self)
        if device.asynchronous:
            self._warm()

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the bundle's drafter, with options as the method's. Raises UsageError, BundleError."""
        assert bundle is not None
        built = bundle.drafter(drafter)
        check_tree(verifier.largest_tree, built.shape.nodes)
        return cls(verifier, built.shape, bundle.tables(drafter), cls.method.parse_options(options), drafter)

    def pending_features(self, sequences: int) -> Mapping[str, Buffer]:
        """See `FeatureReader.pending_features`."""
        (state,) = self.method.hidden_states
        return {state: leading(self._state[names.PENDING_FEATURES], sequences)}

    def pending(self, batch: Several[Sequence], rows: int) -> list[int] | None:
        """See `FeatureReader.pending`. What is pending while other methods draft is not kept."""
        states: list[Any] = [seq.drafting.get(self) for seq in batch]
        if not all(states):
            return None
        space = names.MAX_PENDING_FEATURES - rows
        if space < CATCH_UP:
            raise UsageError(
                f"a tree of {rows} nodes is too large, at most {rows + space - CATCH_UP} can be",
                "lower the budget's nodes",
            )
        found = [state.pending for state in states]
        most = CATCH_UP if self.for_all else space  # sequences that draft at once take in their rows at once
        while max(found) > most:
            self._catch_up(batch)
            found = [state.pending for state in states]
        return found

    def begin(self, seq: Sequence) -> None:
        """See `Drafter.begin`."""
        seq.drafting[self] = Drafting(used=self.shape.steps)

    def prefilled(self, seq: Sequence, start: int, tokens: int) -> None:
        """See `Drafter.prefilled`. All rows go in but the last few, the last of which lacks its token."""
        seq.drafting[self].pending += tokens
        while seq.drafting[self].pending > CATCH_UP:
            self._catch_up([seq])

    def accept(self, seq: Sequence, tree: DraftTree, outcome: Outcome) -> None:
        """See `Drafter.accept`; the rows are there already."""
        drafting: Drafting = seq.drafting[self]
        drafting.pending += 1 + len(outcome.path)
        drafting.used += 1 + len(outcome.path)

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.draft`. Raises ValueError if nothing was committed since the last draft of a sequence.

        Trees on a GPU are as deep and wide as they are made: the budget says how many of their nodes.
        """
        wanted = [budget.nodes > 0 or self.for_all for budget in budgets]
        drafted = [seq for seq, yes in zip(batch, wanted, strict=True) if yes]
        if not all(seq.drafting[self].pending for seq in drafted):
            raise ValueError("nothing was committed since the last draft of a sequence")
        while max(seq.drafting[self].pending for seq in drafted) > CATCH_UP:
            self._catch_up(batch, wanted)
        rows = [seq.drafting[self].pending if yes else 0 for seq, yes in zip(batch, wanted, strict=True)]
        call = self._draft(batch, rows)
        for seq in drafted:
            seq.drafting[self].used = 0
        return call.trees(batch, budgets, [self.shape.nodes] * len(batch), f"draft {self.name}")

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """See `Drafter.move`."""
        self._copy_slot(source, target, seq.drafting[self].cache_len)

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """See `Drafter.measure_ms`."""
        width = self._width(rows)
        call = self._call(DRAFT, 1, width)
        self._fill_rows(call, [rows], [min(kv_len, self.verifier.max_model_len - width)])
        drafted = self._measured(call)
        if RESAMPLE not in self._programs:
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

    def _warm(self) -> None:
        """Run every call, and the verification of what it makes, until it is replayed as a graph."""
        self.verifier.warm()
        for sequences in sorted({1, self.verifier.max_num_seqs}, reverse=True):
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
                    self.verifier.warm_trees(sequences, call.made(""))

    def _catch_up(self, batch: Several[Sequence], wanted: Several[bool] | None = None) -> None:
        """Take in at most CATCH_UP rows of every sequence, and bring the rest forward. Their chains are lost."""
        rows = [min(seq.drafting[self].pending, CATCH_UP) for seq in batch]
        if wanted is not None and not self.for_all:
            rows = [
                count if yes and seq.drafting[self].pending > CATCH_UP else 0
                for seq, yes, count in zip(batch, wanted, rows, strict=True)
            ]
        self._draft(batch, rows)
        for seq, count in zip(batch, rows, strict=True):
            if count:
                seq.drafting[self].used = self.shape.steps
        if len(batch) not in self._shifts:
            pending = leading(self._state[names.PENDING_FEATURES], len(batch))
            self._shifts[len(batch)] = _Shift(self._device, self._gather, pending)
        self._shifts[len(batch)](rows)

    def _width(self, rows: int) -> int:
        """Rows that a draft call has space for which takes in so many."""
        if self._device.step_graphs:
            return names.DRAFT_WIDTHS[bisect_left(names.DRAFT_WIDTHS, rows)]
        return rows if rows <= _ROW_STEP else -(-rows // _ROW_STEP) * _ROW_STEP

    def _draft(self, batch: Several[Sequence], rows: Several[int]) -> _Call:
        """One call that takes in the first rows[i] pending rows of sequence i. On the host, 0 keeps its state."""
        call = self._call(DRAFT, len(batch), self._width(max(rows)))
        states: list[Drafting] = [seq.drafting[self] for seq in batch]
        kept = {} if self._device.step_graphs else self._chains(states, rows)
        values = self._fill_rows(call, rows, [state.cache_len for state in states])
        tokens = values[names.TOKENS]
        for slot, (seq, state, count) in enumerate(zip(batch, states, rows, strict=True)):
            start = state.cache_len + 1
            tokens[slot, :count] = seq.tokens[start : start + count]
            state.cache_len += count
            state.pending -= count
        self._run(DRAFT, call)
        for slot, logits in kept.items():
            array_of(self._state[names.CHAIN_LOGITS])[slot] = logits
        return call

    def _chains(self, states: Several[Drafting], rows: Several[int]) -> dict[int, Array]:
        """Copies of the chains that a draft writes over although it takes in no row, by slot."""
        logits = self._state.get(names.CHAIN_LOGITS)
        if logits is None:
            return {}
        return {
            slot: array_of(logits)[slot].copy()
            for slot, (state, count) in enumerate(zip(states, rows, strict=True))
            if not count and state.used < self.shape.steps
        }

    def _fill_rows(self, call: _Call, rows: Several[int], cache_len: Several[int]) -> Mapping[str, Array]:
        """Set where the next draft's rows lie, and how many there are; what is left to fill in are their tokens."""
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

    def _call(self, graph: str, sequences: int, width: int) -> _Call:
        key = (graph, sequences, width)
        call = self._calls.get(key)
        if call is None:
            held = {
                name: leading(buffer, sequences)
                for name, buffer in self._state.items()
                if name != names.PENDING_FEATURES
            }
            trees = self._trees.setdefault((graph, sequences), {})
            sizes = {"B": sequences, "M": width}
            call = _Call(self._device, self._programs[graph], sizes, {**held, **self._tables, **trees})
            trees.update(call.tree_buffers)  # of calls of all widths, so that one verification does for them
            if graph == DRAFT:
                call.gather(self._gather, leading(self._state[names.PENDING_FEATURES], sequences))
            self._calls[key] = call
        return call


class _Call:
    """One shape of a drafter's program: buffers of its own next to those `given`, and the work that runs it."""

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
        self._run = program.bind(self._buffers)
        self.work = device.chain([self.host_inputs.send, self._run])
        self._tokens, self._parents, self._log_probs = (self._buffers[name] for name in _TREE)

    @property
    def tree_buffers(self) -> dict[str, Buffer]:
        """Where the program writes trees."""
        return {name: self._buffers[name] for name in _TREE}

    def gather(self, program: Program, pending: Buffer) -> None:
        """Take the first pending rows before every run."""
        rows = self._buffers[names.FEATURE_ROWS]
        sequences, width = rows.shape[:2]
        path, start = self._device.empty("int64", sequences, width), self._device.empty("int64", sequences)
        path.write(np.tile(np.arange(width), (sequences, 1)))
        taken = gathered(program, pending, path, rows, start)
        self.work = self._device.chain([self.host_inputs.send, taken, self._run])

    def made(self, stage: str) -> DeviceTrees:
        """The trees of the latest run, made in this stage of a step."""
        return DeviceTrees(self._tokens, self._parents, self._log_probs, self.work, stage)

    def trees(
        self, batch: Several[Sequence], budgets: Several[Budget], nodes: Several[int], stage: str
    ) -> list[DraftTree]:
        """The trees of the latest run, of which `nodes` nodes exist, within the budgets. The host gets copies."""
        if self._device.step_graphs:
            made = self.made(stage)
            return [
                made.tree(slot, min(count, 1 + budget.nodes))
                for slot, (budget, count) in enumerate(zip(budgets, nodes, strict=True))
            ]
        tokens, parents, log_probs = map(array_of, (self._tokens, self._parents, self._log_probs))
        return [
            within(DraftTree(tokens[slot, :n].copy(), parents[slot, :n].copy(), log_probs[slot, :n].copy()), budget)
            if budget.nodes
            else root_only(seq.tokens[-1])
            for slot, (seq, budget, n) in enumerate(zip(batch, budgets, nodes, strict=True))
        ]


_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)


class _Shift:
    """Brings the rows that are still pending to the front."""

    def __init__(self, device: Device, gather: Program, pending: Buffer) -> None:
        sequences, space = pending.shape[0], pending.shape[1] - CATCH_UP
        self._columns = np.arange(space)
        self._host_inputs = device.host_inputs(**{names.PATH: (sequences, space), names.PENDING_OFFSET: (sequences,)})
        path, start = (self._host_inputs.buffers[name] for name in (names.PATH, names.PENDING_OFFSET))
        self._work = device.chain([self._host_inputs.send, gathered(gather, pending, path, pending, start)])

    def __call__(self, gone: Several[int]) -> None:
        """The first gone[i] rows of sequence i went in."""
        self._host_inputs.open()[names.PATH][:] = self._columns + np.array(gone)[:, None]
        self._work()


def within(tree: DraftTree, budget: Budget) -> DraftTree:
    """The nodes of a tree, likeliest first, that a budget has space for: as deep, as wide a level, and as many."""
    if min(budget.nodes, budget.depth, budget.width) >= len(tree) - 1:
        return tree
    depths, levels, keep = [0] * len(tree), [0] * (len(tree) + 1), [0]
    kept = {0}
    for node, parent in enumerate(tree.parents.tolist()[1:], 1):
        depth = depths[node] = depths[parent] + 1
        if parent in kept and depth <= budget.depth and levels[depth] < budget.width and len(keep) <= budget.nodes:
            levels[depth] += 1
            kept.add(node)
            keep.append(node)
    if len(keep) == len(tree):
        return tree
    place = np.zeros(len(tree), np.int64)
    place[keep] = np.arange(len(keep))
    parents = place[tree.parents[keep]]
    parents[0] = -1
    return DraftTree(tree.tokens[keep], parents, tree.log_probs[keep])


def _placed(device: Device, table: Array) -> Buffer:
    buffer = device.empty(str(table.dtype), *table.shape)  # type: ignore[arg-type]
    buffer.write(table)
    return buffer
