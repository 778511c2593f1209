"""Drafters that read the verifier's hidden states and draft in one engine call. Their methods share this code.

The drafter has its own KV. Each row is a pair of the verifier's feature at a position and the next token. Rows of
tokens that were committed since the last draft are pending. The next draft computes them, in several chunks if
necessary. The verifier gathers them in this drafter's buffers. On a GPU trees stay there, and the host knows only their
sizes.

A call computes all slots of a batch, but leaves the slots of other drafters unchanged. It writes their KV after their
valid rows, and stores only the trees of its own slots in the verifier's `TreeStore`. Other data that it would
overwrite are saved before and restored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, Program, Run, sized, slots_of
from redraft.engines.host_buffer import array_of
from redraft.names import DRAFT, RESAMPLE
from redraft.runtime.bound_step import gathered
from redraft.runtime.device_tree import DeviceDrafts, TreeStore
from redraft.runtime.drafters.engine import CATCH_UP
from redraft.runtime.drafters.pending import PendingFeatures
from redraft.runtime.drafters.proposals import AddedLogits, ChainProposal
from redraft.runtime.recent import Recent
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only, within
from redraft.runtime.verifier import WARM_SLOTS, Verifier
from redraft.types import Budget, DraftTree, Draws, Outcome, Proposal, Tree

_TREE = (names.TREE_TOKENS, names.TREE_PARENTS, names.TREE_LOG_PROBS)
_CATCH_UP_CALL = "catch_up"
"""A call of the draft graph that computes pending rows and drafts nothing."""


@dataclass(slots=True)
class Drafting:
    """State of one sequence: used steps of the last draft, rows in the drafter's KV, and pending rows."""

    used: int
    cache_len: int = 0
    pending: int = 0


class HiddenStateDrafter(PendingFeatures):
    """The shared part of such drafters. A subclass sets `method`; its shape has `steps` and `nodes` of a draft."""

    def __init__(self, verifier: Verifier, shape: Any, tables: Mapping[str, Array], options: Any, name: str) -> None:
        """Load its programs. Raises BundleError, and BackendError if they do not fit the device.

        shape: of its graphs.   tables: by name.   options: of the method.   name: the drafter's id.
        """
        device = verifier.device
        self._store = verifier.steps.store if device.step_graphs else None
        several = range(verifier.max_num_seqs) if verifier.max_num_seqs > 1 else range(0)
        chains = (names.CHAIN_LOGITS,) if several and RESAMPLE in self.method.roles(shape) else ()
        step_graphs = (names.STEP_GATHER_FEATURES, *((names.STEP_STORE_TREES,) if self._store else ()))
        super().__init__(verifier, shape, tables, options, name, self.method.spare_rows, step_graphs, chains)
        self._calls: Recent[tuple[str, int, int], _Call] = Recent(self._most_calls, device.wait)
        self._lost_chain: Buffer | None = None
        self._chains = [
            _Backup(device, slots_of(self._state[chain], range(slot, slot + 1))) for chain in chains for slot in several
        ]
        self._nodes = [shape.nodes] * verifier.max_num_seqs
        verifier.attach(self)
        if device.asynchronous:
            self._warm()

    def begin(self, seq: Sequence) -> None:
        """Create the state of `seq`."""
        seq.drafting[self] = Drafting(used=self.shape.steps)

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:
        """Compute all pending rows but the last few. The token of the last row is not known yet."""
        seq.drafting[self].pending += tokens
        while seq.drafting[self].pending > CATCH_UP:
            self._catch_up(seq, slot)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Update the counts of pending rows. The verifier has gathered the rows already."""
        drafting: Drafting = seq.drafting[self]
        drafting.pending += 1 + len(outcome.path)
        drafting.used += 1 + len(outcome.path)

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        """Draft a tree for each sequence. Raises ValueError if a sequence has no new token since its last draft.

        Trees stay on a GPU, and the host sets only their numbers of nodes. If a budget is less deep or wide than the
        drafted tree, the host copies the tree and cuts it.
        """
        rows = [0] * len(batch)
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            if not budget.nodes:
                continue
            drafting: Drafting = seq.drafting[self]
            if not drafting.pending:
                raise ValueError("nothing was committed since the last draft of a sequence")
            while drafting.pending > CATCH_UP:
                self._catch_up(seq, slot)
            rows[slot] = drafting.pending
        if not any(rows):
            return [root_only(seq.tokens[-1]) for seq in batch]
        call = self._call(DRAFT, range(len(batch)), self._width(max(rows)))
        kept = self._chain_backups(batch, rows)
        for backup in kept:
            backup.save()
        self._fill(call, batch, rows)
        self._noise.set(batch, call.host_inputs.open())
        self._run(DRAFT, call.work)
        for backup in kept:
            backup.restore()
        for seq, count in zip(batch, rows, strict=True):
            if count:
                seq.drafting[self].used = 0
        return self._made(call, batch, budgets, self._nodes, f"draft {self.name}")

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft and of a resampling."""
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

    def _measured(self, call: _Call) -> float:
        """Return milliseconds of a run, its wait included."""
        self._device.wait()
        started = time.perf_counter()
        call.work()
        self._device.wait()
        return (time.perf_counter() - started) * 1e3

    def _warm(self) -> None:
        """Run every call until the device replays it as a graph."""
        self.verifier.warm()
        slots = self.verifier.max_num_seqs
        calls = [(_CATCH_UP_CALL, range(slot, slot + 1), CATCH_UP) for slot in range(min(slots, WARM_SLOTS))]
        for sequences in sorted({1, slots}, reverse=True):
            calls += [(DRAFT, range(sequences), width) for width in names.DRAFT_WIDTHS]
            calls += [(RESAMPLE, range(sequences), 0)] if RESAMPLE in self._programs else []
        for kind, taken, width in calls:
            call = self._call(kind, taken, width)
            for _ in range(2):
                if kind == RESAMPLE:
                    call.host_inputs.open()[names.FIRST_STEP][:] = 1
                else:
                    self._fill_rows(call, [1] * len(taken), [0] * len(taken))
                call.work()
                self._device.wait()

    def _catch_up(self, seq: Sequence, slot: int) -> None:
        """Compute CATCH_UP rows of a sequence that has more, and move the rest to the front. Overwrites its chain."""
        drafting: Drafting = seq.drafting[self]
        call = self._call(_CATCH_UP_CALL, range(slot, slot + 1), self._width(CATCH_UP))
        self._fill(call, [seq], [CATCH_UP])
        self._run(DRAFT, call.work)
        drafting.used = self.shape.steps
        self._drop(slot)

    def _make_space(self, seq: Sequence, slot: int) -> None:
        self._catch_up(seq, slot)

    def _fill(self, call: _Call, batch: Several[Sequence], rows: Several[int]) -> None:
        """Set the next run's inputs: the first rows[i] pending rows of sequence i. No rows mean no draft."""
        cache_len = [state.cache_len if (state := self._state_of(seq)) else 0 for seq in batch]
        tokens = self._fill_rows(call, rows, cache_len)
        for place, (seq, start, count) in enumerate(zip(batch, cache_len, rows, strict=True)):
            if count:
                tokens[place, :count] = seq.tokens[start + 1 : start + 1 + count]
                drafting: Drafting = seq.drafting[self]
                drafting.cache_len += count
                drafting.pending -= count

    def _fill_rows(self, call: _Call, rows: Several[int], cache_len: Several[int]) -> Array:
        """Set the position and number of the next draft's rows. Returns their tokens [B, M] for the caller to fill."""
        values = call.host_inputs.open()
        positions, pending, lengths = values[names.POSITIONS], values[names.NUM_PENDING], values[names.CACHE_LEN]
        width = call.width
        for place, start in enumerate(cache_len):
            positions[place] = self._positions[start : start + width]
            pending[place] = rows[place] or 1
            lengths[place] = start
        values[names.KV_LEN][0] = max(cache_len) + width
        if call.stores:
            values[names.DRAFTED][:] = rows
        return values[names.TOKENS]

    def _chain_backups(self, batch: Several[Sequence], rows: Several[int]) -> list[_Backup]:
        """Return copies of the chains that a draft overwrites although it computes no row of their sequences."""
        if 0 not in rows or not self._chains:
            return []
        return [
            self._chains[slot]
            for slot, (seq, count) in enumerate(zip(batch, rows, strict=True))
            if not count and (state := self._state_of(seq)) and state.used < self.shape.steps
        ]

    def _made(
        self, call: _Call, batch: Several[Sequence], budgets: Several[Budget], nodes: Several[int], stage: str
    ) -> list[Tree]:
        """Return the trees of a call's latest run within the budgets, by slot. Each tree has at least `nodes` nodes."""
        proposals = [self._proposal(seq, slot) for slot, seq in enumerate(batch)]
        if self._store is None:
            return [
                within(call.copied(slot, count, proposals[slot]), budget) if budget.nodes else root_only(seq.tokens[-1])
                for slot, (seq, budget, count) in enumerate(zip(batch, budgets, nodes, strict=False))
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

    def _proposal(self, seq: Sequence, slot: int) -> Proposal | None:
        """Return the distributions of the candidates of `seq`, if they were drawn from the unused steps."""
        state = self._state_of(seq)
        if state is None or not seq.noise.drawn:
            return None
        chain = slots_of(self._state[names.CHAIN_LOGITS], range(slot, slot + 1))
        scale, tokens = (
            seq.noise.logit_scale(self.shape.draft_logit_scale),
            self._host_tables.get(names.DRAFT_VOCABULARY),
        )
        return ChainProposal(chain, state.used, scale, tokens, self.added_logits)

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

    def _call(self, kind: str, slots: range, width: int) -> _Call:
        key = (kind, slots.stop, width)
        return self._calls.get(key) or self._calls.add(key, self._bound(kind, slots, width))

    def _bound(self, kind: str, slots: range, width: int) -> _Call:
        """Return a call over the slots' state, bound to buffers."""
        program = self._programs[RESAMPLE if kind == RESAMPLE else DRAFT]
        given = {name: slots_of(buffer, slots) for name, buffer in self._state.items()}
        waiting = [names.of_state(names.PENDING_FEATURES, place) for place in range(len(self._hidden_states))]
        pending = [given.pop(name) for name in waiting] if kind != RESAMPLE else []
        store = self._store
        if kind == _CATCH_UP_CALL:
            store = None
            if names.CHAIN_LOGITS in given:
                chain = self._lost_chain = self._lost_chain or _like(self._device, given[names.CHAIN_LOGITS])
                given[names.CHAIN_LOGITS] = chain
        noise = self._noise.without if kind == _CATCH_UP_CALL else self._noise.buffers(len(slots))
        given |= {**noise, **self._tables}
        sizes = {"B": len(slots), "M": width}
        return _Call(self._device, program, self._step_programs, sizes, given, pending, store)


class _Call:
    """One shape of a drafter's program: its buffers next to those in `given`, and the work that runs it.

    pending: the sources of rows before every run, by hidden state.   store: the target of trees after every run. With
    several slots, it receives only the trees of those that `names.DRAFTED` marks.
    """

    def __init__(
        self, device: Device, program: Program, step_programs: Mapping[str, Program], sizes: Mapping[str, int],
        given: Mapping[str, Buffer], pending: Several[Buffer], store: TreeStore | None,
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
        for spec in (*program.inputs, *program.outputs):
            if spec.name not in known:
                other = known.get(spec.in_place_of) if spec.in_place_of else None
                known[spec.name] = other or device.empty(spec.dtype, *sized(spec.shape, sizes))
        runs = [program.bind({spec.name: known[spec.name] for spec in (*program.inputs, *program.outputs)})]
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

    def drafts(self, nodes: Several[int], proposals: Several[Proposal | None], stage: str) -> DeviceDrafts:
        """Return the trees of the latest run in this stage of a step. nodes: how many nodes of each tree exist."""
        return DeviceDrafts(self._tokens, self._parents, self._log_probs, nodes, self.work, stage, proposals)

    def copied(self, slot: int, nodes: int, proposal: Proposal | None) -> Tree:
        """Return the first nodes of a tree of the latest run, on the host."""
        buffers = self._tokens, self._parents, self._log_probs
        tokens, parents, log_probs = (array_of(buffer)[slot, :nodes].copy() for buffer in buffers)
        return DraftTree(tokens, parents, log_probs, Draws.of(proposal, nodes))


class _Backup:
    """A copy of a buffer, which restores the buffer after a call has overwritten it."""

    def __init__(self, device: Device, buffer: Buffer) -> None:
        copy = _like(device, buffer)
        self.save, self.restore = device.copy(copy, buffer), device.copy(buffer, copy)


def _like(device: Device, buffer: Buffer) -> Buffer:
    """Return a new buffer of the same type and shape."""
    return device.empty(buffer.dtype, *buffer.shape)
