"""Drafters that read the verifier's hidden states and draft a tree in one engine call. Their methods share this code.

The verifier gathers rows of hidden states in this drafter's buffers. On a GPU trees stay there, and the host knows only
their sizes, and the verifier's `TreeStore` gets only the trees of slots with a budget.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, Program, Run, sized, slots_of
from redraft.engines.drafters import BuiltDrafter
from redraft.engines.host_device import array_of
from redraft.lru import LruCache
from redraft.names import DRAFT, RESAMPLE
from redraft.runtime.drafters.candidate_noise import AddedLogits, ChainProposal
from redraft.runtime.drafters.engine import FeatureBuffers
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.bound_step import bound, gathered
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.device_tree import DeviceDrafts, TreeStore
from redraft.runtime.trees.tree import root_only, within
from redraft.types import Budget, DraftTree, Draws, Proposal, Tree

_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)
CallShape = tuple[str, range, int]
"""A kind of call, its slots and its rows."""


@dataclass(slots=True)
class Drafting:
    """State of one sequence: used steps of the last draft, rows in the drafter's KV, and rows that a draft reads."""

    used: int
    cache_len: int = 0
    pending: int = 0


class OneCallDrafter(FeatureBuffers):
    """The shared part of such drafters. The method's shape has `steps` and `nodes` of a draft."""

    def __init__(
        self, verifier: Verifier, built: BuiltDrafter, tables: Mapping[str, Array], options: Any,
        copied: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Load its programs. The arguments and errors are those of `EngineDrafter`."""
        device = verifier.device
        self._store = verifier.steps.store if device.step_graphs else None
        step_graphs = (names.STEP_GATHER_FEATURES, *((names.STEP_STORE_TREES,) if self._store else ()))
        super().__init__(verifier, built, tables, options, step_graphs, copied)
        self._calls: LruCache[tuple[CallShape, bool], TreeCall] = LruCache(self._most_calls, device.wait)
        verifier.attach(self)
        if device.asynchronous:
            self._warm()

    def begin(self, seq: Request) -> None:
        seq.drafting[self] = Drafting(used=self.shape.steps)

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """Draft a tree for each sequence. Raises ValueError if a sequence has no new token since its last draft.

        Trees stay on a GPU, and the host sets only their numbers of nodes. If a budget is less deep or wide than the
        drafted tree, the host copies the tree and cuts it.
        """
        rows = [
            self._ready(seq, slot) if budget.nodes else 0
            for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True))
        ]
        width = self._width(max(rows))  # of all calls: kernels round other numbers of rows differently

        def make(slots: range, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
            return self._draft(self._call(DRAFT, slots, width), slots, batch, budgets, rows[slots.start : slots.stop])

        return self._over_runs(make, batch, budgets)

    def _over_runs(
        self, make: Callable[[range, Sequence[Request], Sequence[Budget]], list[Tree]],
        batch: Sequence[Request], budgets: Sequence[Budget],
    ) -> list[Tree]:  # fmt: skip
        """Return the trees that `make` makes for each call's slots, and roots for the other ones."""
        trees: list[Tree] = [root_only(seq.tokens[-1]) for seq in batch]
        for slots in self._runs(budgets):
            part = slice(slots.start, slots.stop)
            trees[part] = make(slots, batch[part], budgets[part])
        return trees

    def _draft(
        self, call: TreeCall, slots: range, batch: Sequence[Request], budgets: Sequence[Budget], rows: Sequence[int]
    ) -> list[Tree]:
        """Draft for the sequences in these slots, of which each reads so many rows. No rows mean no draft."""
        self._fill(call, batch, rows)
        self._noise.set(batch, call.host_inputs.open(), slots.start)
        self._run_draft(call, batch, rows)
        for seq, count in zip(batch, rows, strict=True):
            if count:
                seq.drafting[self].used = 0
        return self._made(call, slots, batch, budgets, [self.shape.nodes] * len(slots), f"draft {self.name}")

    def ready(self, seq: Request) -> bool:
        """True if there is a row to read that no draft has read."""
        pending: int = seq.drafting[self].pending
        return pending > 0

    @abstractmethod
    def _ready(self, seq: Request, slot: int) -> int:
        """Return how many rows the next draft of a sequence reads, at least 1. Raises ValueError if there are none."""

    @abstractmethod
    def _fill(self, call: TreeCall, batch: Sequence[Request], rows: Sequence[int]) -> None:
        """Set the next run's inputs: the first rows[i] rows of sequence i. No rows mean no draft."""

    @abstractmethod
    def _fill_rows(self, call: TreeCall, rows: Sequence[int], cache_len: Sequence[int]) -> Array:
        """Set the next run's rows after `cache_len` ones of the drafter's KV. Returns their tokens for the caller."""

    def _run_draft(self, call: TreeCall, batch: Sequence[Request], rows: Sequence[int]) -> None:
        """Run a draft."""
        self._run(DRAFT, call.work)

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        width = self._width(rows)
        self._noise.clear()
        call = self._call(DRAFT, range(1), width)
        self._fill_rows(call, [rows], [min(kv_len, self.verifier.max_model_len - width)])
        drafted = self._measured(call)
        if RESAMPLE not in self._programs:
            return drafted, 0.0
        again = self._call(RESAMPLE, range(1), 0)
        again.host_inputs.open()[names.FIRST_STEP][:] = 1
        return drafted, self._measured(again)

    def _measured(self, call: TreeCall) -> float:
        """Return milliseconds of a run, its wait included."""
        self._device.wait()
        started = time.perf_counter()
        call.work()
        self._device.wait()
        return (time.perf_counter() - started) * 1e3

    def _warm(self) -> None:
        """Run every call until the device replays it as a graph."""
        self.verifier.warm()
        for kind, taken, width in self._warm_calls():
            call = self._call(kind, taken, width)
            for _ in range(2):
                if kind == RESAMPLE:
                    call.host_inputs.open()[names.FIRST_STEP][:] = 1
                else:
                    self._fill_rows(call, [1] * len(taken), [0] * len(taken))
                call.work()
                self._device.wait()

    def _warm_calls(self) -> list[CallShape]:
        """Return the calls of one sequence and of the largest batch, the largest first."""
        calls: list[CallShape] = []
        for sequences in sorted({1, self.verifier.max_num_seqs}, reverse=True):
            calls += [(DRAFT, range(sequences), width) for width in self._widths]
            calls += [(RESAMPLE, range(sequences), 0)] if RESAMPLE in self._programs else []
        return calls

    @property
    def _widths(self) -> tuple[int, ...]:
        """The rows of a device's draft calls."""
        return names.DRAFT_WIDTHS

    def _made(
        self,
        call: TreeCall,
        slots: range,
        batch: Sequence[Request],
        budgets: Sequence[Budget],
        nodes: Sequence[int],
        stage: str,
    ) -> list[Tree]:
        """Return the trees of a call's latest run within the budgets, by slot. Each tree has at least `nodes` nodes."""
        proposals = [self._proposal(seq, slot) for slot, seq in zip(slots, batch, strict=True)]
        if self._store is None:
            return [
                within(call.copied(place, count, proposals[place]), budget)
                for place, (budget, count) in enumerate(zip(budgets, nodes, strict=True))
            ]
        drafts = call.drafts(nodes, proposals, stage)
        trees: list[Tree] = []
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            if not budget.nodes:
                trees.append(root_only(seq.tokens[-1]))
            elif self._cuts(budget, nodes[slot]):
                trees.append(within(drafts.copied(slot, nodes[slot]), budget))
            else:
                trees.append(drafts.tree(slot, budget.nodes))
        return trees

    def _proposal(self, seq: Request, slot: int) -> Proposal | None:
        """Return the distributions of the candidates of `seq`, if they were drawn from the unused steps."""
        state = self._state_of(seq)
        if state is None or not seq.noise.drawn:
            return None
        chain, first = slots_of(self._state[names.CHAIN_LOGITS], range(slot, slot + 1)), state.used
        scale = seq.noise.logit_scale(self.shape.draft_logit_scale)
        tokens = self._host_tables.get(names.DRAFT_VOCABULARY)

        def rows() -> Array:
            """Return the logits of the unused steps."""
            unused: Array = (chain.read() if chain.host is None else chain.host)[0, first:]
            return unused

        return ChainProposal(rows, scale, tokens, self.added_logits)

    @property
    def added_logits(self) -> AddedLogits | None:
        """The numbers that a token adds to the next token's logits, if the method has them."""
        return None

    def _cuts(self, budget: Budget, nodes: int) -> bool:
        """Return true if the first `nodes` nodes of a tree may be deeper, or wider in one level, than a budget."""
        limits = self.limits
        if budget.depth >= limits.depth and budget.width >= limits.width:
            return False
        most = min(nodes - 1, budget.nodes)
        return budget.depth < min(limits.depth, most) or budget.width < min(limits.width, most)

    def _call(self, kind: str, slots: range, width: int) -> TreeCall:
        key = (kind, slots, width), self._on_one_thread
        return self._calls.get(key, lambda: self._bound(kind, slots, width))

    def _bound(self, kind: str, slots: range, width: int) -> TreeCall:
        """Return a call over the slots' state, bound to buffers."""
        return self._over(kind, slots, width, self._noise.buffers(slots), self._store)

    def _over(
        self, role: str, slots: range, width: int, others: Mapping[str, Buffer], store: TreeStore | None
    ) -> TreeCall:
        """Return a call of a graph over the slots' state, tables and the buffers in `others`, with its trees' store.

        Rows of hidden states are copied to the graph's input, unless it reads the pending rows themselves.
        """
        program = self._draft_program(len(slots) * width) if role == DRAFT else self._programs[role]
        given = {name: slots_of(buffer, slots) for name, buffer in self._state.items()}
        pending = []
        if any(spec.name == names.FEATURE_ROWS for spec in program.inputs):
            waiting = [names.of_state(names.PENDING_FEATURES, place) for place in range(len(self._hidden_states))]
            pending = [given.pop(name) for name in waiting]
            given |= self._read_rows(len(slots), width)
        given |= {**others, **self._tables}
        sizes = {"B": len(slots), "M": width}
        return TreeCall(self._device, program, self._step_programs, sizes, given, pending, store)


class TreeCall:
    """One shape of a drafter's program: its buffers next to those in `given`, and the work that runs it.

    pending: the sources of rows before every run, by hidden state.   store: the target of trees after every run. With
    several slots, it receives only the trees of those that `names.DRAFTED` marks.
    """

    def __init__(  # noqa: PLR0913 - the sizes and buffers of one call
        self, device: Device, program: Program, step_programs: Mapping[str, Program], sizes: Mapping[str, int],
        given: Mapping[str, Buffer], pending: Sequence[Buffer], store: TreeStore | None,
    ) -> None:  # fmt: skip
        self.width = sizes["M"]
        self.stores = store is not None and sizes["B"] > 1
        self._device = device
        self._step_programs = step_programs
        known = dict(given)
        if store is not None and not self.stores:  # with one sequence, the program writes to the store directly
            tree = next(spec.shape for spec in program.outputs if spec.name == names.TREE_TOKENS)
            known[names.TREE_TOKENS], known[names.TREE_PARENTS] = store.first(sized(tree, sizes)[1])
        shapes = {
            spec.name: sized(spec.shape, sizes)
            for spec in program.inputs
            if spec.dtype == "int64" and spec.name not in known
        }
        drafted = {names.DRAFTED: (sizes["B"],)} if self.stores else {}
        self.host_inputs = device.host_inputs(**shapes, **drafted)
        known |= self.host_inputs.buffers
        runs = [bound(device, program, known, sizes)]
        for place, rows in enumerate(pending):
            runs.insert(0, self._taking(rows, known[names.of_state(names.FEATURE_ROWS, place)]))
        self._tokens, self._parents, self._log_probs = (known[name] for name in _TREE)
        if store is not None and self.stores:
            runs.append(self._storing(store, known[names.DRAFTED]))
        self.work = device.chain([self.host_inputs.send, *runs])

    def _taking(self, pending: Buffer, rows: Buffer) -> Run:
        """Return the copy of the first pending rows to the program's input."""
        sequences, width = rows.shape[:2]
        path, start = self._device.empty("int64", sequences, width), self._device.empty("int64", sequences)
        path.write(np.tile(np.arange(width), (sequences, 1)))
        return gathered(self._step_programs[names.STEP_GATHER_FEATURES], pending, path, rows, start)

    def _storing(self, store: TreeStore, drafted: Buffer) -> Run:
        """Return the copy of the trees of `drafted` slots to the store."""
        tokens, parents = store.of(drafted.shape[0])
        return self._step_programs[names.STEP_STORE_TREES].bind({
            names.TREE_TOKENS: self._tokens, names.TREE_PARENTS: self._parents, names.DRAFTED: drafted,
            names.STORED_TOKENS: tokens, names.STORED_PARENTS: parents,
            names.present(names.STORED_TOKENS): tokens, names.present(names.STORED_PARENTS): parents,
        })  # fmt: skip

    def drafts(self, nodes: Sequence[int], proposals: Sequence[Proposal | None], stage: str) -> DeviceDrafts:
        """Return the trees of the latest run in this stage of a step. nodes: how many nodes of each tree exist."""
        return DeviceDrafts(self._tokens, self._parents, self._log_probs, nodes, self.work, stage, proposals)

    def copied(self, slot: int, nodes: int, proposal: Proposal | None) -> Tree:
        """Return the first nodes of a tree of the latest run, on the host."""
        buffers = self._tokens, self._parents, self._log_probs
        tokens, parents, log_probs = (array_of(buffer)[slot, :nodes].copy() for buffer in buffers)
        return DraftTree(tokens, parents, log_probs, Draws.of(proposal, nodes))
