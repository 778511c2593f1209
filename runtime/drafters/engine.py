"""Drafters with engines of their own: the parts that all of them share.

The drafter has its own KV in each slot. Rows of tokens that were committed since its last draft are pending, and the
next draft computes them, in several chunks if necessary. Of a prompt, a few hundred rows may be pending too if several
sequences can run: a full batch may never draft, and would compute them for nothing.

On the host, calls leave out the slots that nobody drafts for. A device has calls of all slots of a batch only, prepared
before the first request. They leave idle slots unchanged: they write the KV of these after their valid rows.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.engines import check_tree
from redraft.engines.bundle import Bundle
from redraft.engines.device import Array, Buffer, Device, Program, Work, byte_size, sized, slots_of
from redraft.engines.drafters import BuiltDrafter
from redraft.engines.host_memory import use_small_pages
from redraft.errors import UsageError
from redraft.lru import LruCache
from redraft.names import COPY_SLOT, DRAFT, RESAMPLE, drafter_graph
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.drafters.candidate_noise import SlotNoise
from redraft.runtime.observe.profiling import WAIT
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.bound_step import gathered, slot_copy
from redraft.runtime.steps.verifier import PREFILL_CHUNK, Verifier
from redraft.types import Budget

CATCH_UP = names.CATCH_UP_ROWS
_FEW_ROWS = 8
"""Rows of a call that may have one thread. Rows of prompts and of large batches are work for all."""
_ROW_STEP = 16
"""The host pads more rows than this to a multiple of it, so that it prepares few shapes."""
MOST_WAITING = names.MAX_PENDING_FEATURES - PREFILL_CHUNK
"""Rows of a prompt that may wait for a first draft: a buffer of hidden states then has space for one more chunk."""
MOST_CALLS = 128
"""Call shapes in memory for every four slots. Shapes that compute a prompt's rows have one slot each."""


class EngineDrafter(TreeMaker):
    """The shared part of such drafters. The method's shape has `nodes` of a draft."""

    has_engines = True

    def __init__(
        self, verifier: Verifier, built: BuiltDrafter, tables: Mapping[str, Array], options: Any,
        step_graphs: tuple[str, ...] = (), copied: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Load its programs. Raises BundleError, and BackendError if they do not fit the device.

        tables: arrays by name.   options: the method's.   step_graphs: graphs of a step that it runs.
        copied: tensors of the state that it also has a copy of.
        """
        super().__init__(verifier)
        self.options = options
        self.method, self.name, self.shape = built.method, built.id, built.shape
        name, shape = self.name, self.shape
        self.limits = self.method.limits(shape)
        device = self._device = verifier.device
        sizes = {
            "B": verifier.slots,
            "C": names.kv_rows(verifier.max_model_len + self.method.spare_rows),
            "W": names.MAX_PENDING_FEATURES,
        }
        state = {spec.name: byte_size(spec.dtype, sized(spec.shape, sizes)) for spec in self.method.state(shape)}
        graphs = tuple(self.method.roles(shape))
        device.expect({
            "drafter's KV and pending rows": sum(state.values()),
            "copies of the drafter's chains": sum(state[name] for name in copied),
            "drafter's tables": sum(table.nbytes for table in tables.values()),
        }, (*(drafter_graph(name, role) for role in graphs), *step_graphs))  # fmt: skip
        self._programs = {role: device.program(drafter_graph(name, role), short=role == RESAMPLE) for role in graphs}
        self._one_thread: Program | None = None
        self._on_one_thread = False
        self._step_programs = {graph: device.program(graph) for graph in step_graphs}
        self._state = {
            spec.name: device.empty(spec.dtype, *sized(spec.shape, sizes)) for spec in self.method.state(shape)
        }
        for buffer in self._state.values():
            if buffer.host is not None:  # as `HostSteps` does for the verifier's rows
                use_small_pages(buffer.host if verifier.max_num_seqs > 1 else buffer.host[1:])
        self._tables = {name: _placed(device, table) for name, table in tables.items()}
        self._host_tables = tables
        self._noise = SlotNoise(device, sizes["B"], shape.draft_logit_scale)
        self._positions = np.arange(sizes["C"])
        self._copy_slot = slot_copy(device, drafter_graph(name, COPY_SLOT), self._state)

    @classmethod
    def create(
        cls, verifier: Verifier, options: Mapping[str, Any], bundle: Bundle | None = None, drafter: str = ""
    ) -> Self:
        """Return the bundle's drafter, with options of the method. Raises UsageError, BundleError."""
        assert bundle is not None
        built = bundle.drafter(drafter)
        check_tree(verifier.largest_tree, built.shape.nodes)
        return cls(verifier, built, bundle.tables(drafter), built.method.parse_options(options))

    @property
    def _most_calls(self) -> int:
        """Calls of one kind in memory."""
        return MOST_CALLS * -(-self.verifier.max_num_seqs // 4)

    @property
    def _most_waiting(self) -> int:
        """Rows that may be pending after a prompt. A single sequence nearly always drafts, so it computes most."""
        return MOST_WAITING if self.verifier.max_num_seqs > 1 else CATCH_UP

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Begin `seq` without rows of the earlier request. A subclass that can take them over does so."""
        self.begin(seq)
        return 0

    def move(self, seq: Request, source: int, target: int) -> None:
        self._copy_slot(source, target, seq.drafting[self].cache_len)

    def _runs(self, budgets: Sequence[Budget]) -> list[range]:
        """Return the slots of each call that drafts within these budgets, by slot.

        On the host, each has one run of slots with a budget: another call costs less than a slot without one.
        """
        asked = [slot for slot, budget in enumerate(budgets) if budget.nodes]
        if self._device.step_graphs:
            return [range(len(budgets))] if asked else []
        ends = [slot for slot in asked if slot + 1 not in asked]
        starts = [slot for slot in asked if slot - 1 not in asked]
        return [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]

    @abstractmethod
    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft with `rows` pending rows after `kv_len` ones, and of a resampling.

        0 for a resampling if the method has none. No request may be running.
        """

    def load_one_thread(self) -> None:
        """Load the draft's program a second time, with one of the host's threads, for `draft_on_one_thread`."""
        if self._one_thread is None:
            self._one_thread = self._device.program(drafter_graph(self.name, DRAFT), short=True)

    def draft_on_one_thread(self, one: bool) -> None:
        """Let calls of a few rows have one thread, or all: waking the others may take longer than a small draft.

        No step may be running.
        """
        self._on_one_thread = one

    def _draft_program(self, rows: int) -> Program:
        """Return the program of drafts over so many rows of all slots."""
        few = self._on_one_thread and rows <= _FEW_ROWS
        return self._one_thread if few and self._one_thread is not None else self._programs[DRAFT]

    def _width(self, rows: int) -> int:
        """Return the rows of the smallest draft call that fits `rows` pending rows."""
        if self._device.step_graphs:
            return names.DRAFT_WIDTHS[bisect_left(names.DRAFT_WIDTHS, rows)]
        return rows if rows <= _ROW_STEP else -(-rows // _ROW_STEP) * _ROW_STEP

    def _run(self, graph: str, work: Work) -> None:
        """Run work of a graph as a range of the profile."""
        ranges = self.verifier.ranges
        with ranges.call(drafter_graph(self.name, graph)):
            work()
            if ranges.listener is not None and ranges.listener.waits:
                with ranges.stage(WAIT):
                    self._device.wait()


def _placed(device: Device, table: Array) -> Buffer:
    buffer = device.empty(str(table.dtype), *table.shape)  # type: ignore[arg-type]
    buffer.write(table)
    return buffer


class FeatureBuffers(EngineDrafter):
    """A drafter with buffers of the verifier's hidden states. It attaches itself to the verifier."""

    @abstractmethod
    def pending(self, batch: Sequence[Request], rows: int, slots: range) -> list[int] | None:
        """See `redraft.runtime.steps.verifier.FeatureReader.pending`."""

    def close(self) -> None:
        super().close()
        self.verifier.detach(self)

    @cached_property
    def _hidden_states(self) -> tuple[str, ...]:
        return self.method.states_of(self.shape)

    def pending_features(self, slots: range) -> Mapping[str, Buffer]:
        """Return the buffers [B, W, n] of these slots, by hidden state."""
        return {
            state: slots_of(self._state[names.of_state(names.PENDING_FEATURES, place)], slots)
            for place, state in enumerate(self._hidden_states)
        }

    @cached_property
    def _feature_rows(self) -> tuple[Buffer, ...]:
        """Rows of a call, by hidden state. Calls never run together, so all share this memory."""
        pending = self.pending_features(range(1)).values()
        slots = self.verifier.max_num_seqs
        return tuple(self._device.empty(rows.dtype, slots, CATCH_UP, rows.shape[2]) for rows in pending)

    def _read_rows(self, sequences: int, width: int) -> dict[str, Buffer]:
        """Return a graph's inputs of hidden states, for so many rows of each sequence."""
        return {
            names.of_state(names.FEATURE_ROWS, place): rows.part(sequences, width, rows.shape[2])
            for place, rows in enumerate(self._feature_rows)
        }

    def _state_of(self, seq: Request) -> Any:
        """Return the state of `seq`; None if another method drafts for it."""
        return seq.drafting.get(self)

    @property
    def _gather(self) -> Program:
        return self._step_programs[names.STEP_GATHER_FEATURES]


class PendingFeatures(FeatureBuffers):
    """A drafter that reads all rows. The state of a sequence has `pending`, the number of its rows that wait."""

    @cached_property
    def _shifts(self) -> LruCache[int, Shift]:
        return LruCache(self._most_calls, self._device.wait)

    def pending(self, batch: Sequence[Request], rows: int, slots: range) -> list[int] | None:
        """Return how many rows of each sequence are pending. Raises UsageError without space for `rows` more."""
        if not any([self._state_of(seq) is not None for seq in batch]):
            return None
        space = space_before(rows)
        found, reads = [], False
        for slot, seq in zip(slots, batch, strict=True):
            state = self._state_of(seq)
            while state and state.pending > space:
                self._make_space(seq, slot)
            found.append(state.pending if state else 0)
            reads = reads or state is not None
        return found if reads else None

    @abstractmethod
    def _make_space(self, seq: Request, slot: int) -> None:
        """Use CATCH_UP rows of a sequence that has more, and drop them."""

    def _drop(self, slot: int) -> None:
        """Move the rows of a slot after the first CATCH_UP ones to the front."""
        pending = tuple(self.pending_features(range(slot, slot + 1)).values())
        shift = self._shifts.get(slot, lambda: Shift(self._device, self._gather, pending))
        shift()


def space_before(rows: int) -> int:
    """Return the pending rows that a buffer can have before `rows` more.

    Raises UsageError if these are too many for a call that catches up.
    """
    space = names.MAX_PENDING_FEATURES - rows
    if space < CATCH_UP:
        raise UsageError(
            f"a tree of {rows} nodes is too large, at most {rows + space - CATCH_UP} can be",
            "lower the budget's nodes",
        )
    return space


class Shift:
    """Moves the pending rows of a slot to the front after a call has used the first CATCH_UP ones."""

    def __init__(self, device: Device, gather: Program, pending: Sequence[Buffer]) -> None:
        space = pending[0].shape[1] - CATCH_UP
        path, start = device.empty("int64", 1, space), device.empty("int64", 1)
        path.write(np.arange(CATCH_UP, CATCH_UP + space)[None])
        self._run = device.chain([gathered(gather, rows, path, rows, start) for rows in pending])

    def __call__(self) -> None:
        self._run()
