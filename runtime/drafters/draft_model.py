"""An independent draft model in the runtime: it drafts a token at a time, and stops as soon as a budget says so.

Its rows are tokens: row r of its KV is that of the token at position r, so it catches up by tokens alone. Rows of
drafted tokens stay valid if the same tokens are committed, whatever committed them. The others are overwritten.

One run of the graph computes one level. Runs of a chain are one work of the device, in which each run reads the token
that the one before chose. The host reads probabilities between two works, so they decide where a draft can stop. The
host runs one level at a time if the budget may stop the draft: a run costs it a few microseconds more than its work. On
other devices a work has at least `STOP_STEPS` levels, since each wait costs as much as a level or two. Drafts of a
fixed length take the fewest works of `STEP_COUNTS` levels. A graph that unrolls the levels would be no faster, and
ONNX Runtime would pack the weights of each level anew.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, HostOutputs, Program, sized, slots_of
from redraft.methods.draft_model import METHOD
from redraft.names import DRAFT
from redraft.runtime.drafters.draft_model_tree import GrowingTree, log_share
from redraft.runtime.drafters.engine import CATCH_UP, MOST_CALLS, EngineDrafter
from redraft.runtime.drafters.proposals import RowsProposal
from redraft.runtime.drafters.slot_noise import SlotNoise
from redraft.runtime.recent import Recent
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only, within
from redraft.runtime.verifier import WARM_SLOTS, Verifier
from redraft.types import Budget, DraftTree, Draws, FloatArray, Tree

STEP_COUNTS = (1, 2, 4, 8, 16)
"""Levels of one work."""
STOP_STEPS = 4
"""Levels of a work on a device other than the host, if a draft may stop after it."""
_MEASURED_STEPS = 4
_LEARN = 0.125
"""Weight of the latest draft in the running time of a level."""


@dataclass(slots=True)
class Drafting:
    """State of one sequence: KV rows of committed tokens, and the drafted tokens whose rows follow them."""

    cache_len: int = 0
    drafted: list[int] = field(default_factory=list)

    def commit(self, tokens: Several[int]) -> None:
        """Keep the rows of drafted tokens that were committed. The last token's row is computed again."""
        most = len(tokens) - 1
        for token in self.drafted:
            if self.cache_len >= most or tokens[self.cache_len] != token:
                break
            self.cache_len += 1
        self.drafted = []


@dataclass(slots=True)
class Chain:
    """A draft in progress.

    left: levels that the budget still allows.   least, least_joint: logarithms under which a token's probability, and
    the joint one, end the draft.   logits: of each level, if its tokens are drawn.
    """

    left: int
    least: float
    least_joint: float
    tokens: list[int]
    log_probs: list[float] = field(default_factory=lambda: [0.0])
    logits: list[FloatArray] = field(default_factory=list)

    @classmethod
    def of(cls, seq: Sequence, budget: Budget, steps: int) -> Chain:
        """Return the chain of the root alone. The host does not know the probabilities of drawn tokens."""
        left = min(budget.depth, budget.nodes, steps) if budget.width else 0
        confidence, share = (0.0, 0.0) if seq.noise.drawn else (budget.confidence or 0.0, budget.share)
        return cls(left, log_share(confidence), log_share(share), [seq.tokens[-1]])

    @property
    def may_stop(self) -> bool:
        """True if a token's probability may end the draft."""
        return max(self.least, self.least_joint) > -np.inf

    def add(self, token: int, log_prob: float) -> None:
        """Add a level, unless the draft has ended."""
        if not self.left:
            return
        joint = self.log_probs[-1] + log_prob
        self.tokens.append(token)
        self.log_probs.append(joint)
        self.left = 0 if log_prob < self.least or joint < self.least_joint else self.left - 1


class DraftModelDrafter(EngineDrafter):
    """Drafts chains, or trees if its shape is wide, with a decoder of its own."""

    method = METHOD

    def __init__(self, verifier: Verifier, shape: Any, tables: Mapping[str, Array], options: Any, name: str) -> None:
        """Load its program. Raises as `EngineDrafter`."""
        super().__init__(verifier, shape, tables, options, name, METHOD.spare_rows)
        most_calls = MOST_CALLS * -(-verifier.max_num_seqs // 4)
        self._calls: Recent[tuple[range, int, int, int], _Call] = Recent(most_calls, self._device.wait)
        self._positions = np.minimum(self._positions, verifier.max_model_len - 1)
        """Position of each row. No token has a row beyond the context; those of padding must have some position."""
        self._logits: list[Buffer] = []
        if self._device.asynchronous:
            self._warm()

    def begin(self, seq: Sequence) -> None:
        """Create the state of `seq`."""
        seq.drafting[self] = Drafting()

    def prefilled(self, seq: Sequence, slot: int, start: int, tokens: int) -> None:
        """Compute the rows of the prompt so far, but the last few."""
        self._catch_up(seq, slot, start + tokens)

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        """Draft a chain for each sequence, up to the token that ends it by its budget, or a tree if the shape is wide.

        Drawn candidates are chains: a tree's logits after equal tokens of a level differ, which no `Proposal` can tell.
        """
        widths = [
            1 if seq.noise.drawn else min(budget.width, self.shape.width)
            for seq, budget in zip(batch, budgets, strict=True)
        ]
        if max(widths) > 1:
            return self._draft_trees(batch, budgets, widths)
        return self._draft_chains(batch, budgets)

    def _draft_chains(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[Tree]:
        steps = self.shape.steps
        chains = [Chain.of(seq, budget, steps) for seq, budget in zip(batch, budgets, strict=True)]
        if not any(chain.left for chain in chains):
            return [root_only(seq.tokens[-1]) for seq in batch]
        starts, pending = self._begin(batch, [chain.left for chain in chains])
        level = 0
        while left := max(chain.left for chain in chains):
            began = time.perf_counter()
            levels = self._levels(left, any(chain.left and chain.may_stop for chain in chains))
            self._extend(batch, chains, starts, pending, level, levels)
            if level:
                self._learn_step_ms((time.perf_counter() - began) * 1e3 / levels)
            for slot, rows in enumerate(pending):
                if rows:
                    starts[slot] += len(rows) + levels - 1
                    pending[slot] = chains[slot].tokens[-1:]
            level += levels
        for seq, chain, rows in zip(batch, chains, pending, strict=True):
            if rows:
                seq.drafting[self].drafted = chain.tokens[1:level]
        return [self._tree(seq, chain) for seq, chain in zip(batch, chains, strict=True)]

    def _begin(self, batch: Several[Sequence], levels: Several[int]) -> tuple[list[int], list[list[int]]]:
        """Return the valid rows of each slot, and the tokens to compute after them; none for slots without a draft."""
        starts, pending = [], []
        for slot, (seq, left) in enumerate(zip(batch, levels, strict=True)):
            state: Drafting | None = seq.drafting.get(self)
            rows: list[int] = []
            if state is not None and left:
                self._catch_up(seq, slot, len(seq.tokens))
                rows = seq.tokens[state.cache_len :]
            elif state is not None:
                state.commit(seq.tokens)
            starts.append(state.cache_len if state else 0)
            pending.append(rows)
            if state is not None:
                state.cache_len += len(rows)
        return starts, pending

    def _width(self, rows: int) -> int:
        """Return the rows of the smallest run that fits `rows` pending rows."""
        return 1 if rows <= 1 else super()._width(rows)

    def _levels(self, left: int, may_stop: bool) -> int:
        """Return the levels of the next work, if the longest draft has `left` levels left."""
        if self.shape.width > 1:
            return 1  # a run's candidates are not yet the next one's tokens
        if may_stop:
            left = min(left, STOP_STEPS if self._device.asynchronous else 1)
        return STEP_COUNTS[bisect_right(STEP_COUNTS, left) - 1]

    def _extend(
        self, batch: Several[Sequence], chains: Several[Chain], starts: Several[int], pending: Several[Several[int]],
        level: int, levels: int,
    ) -> None:  # fmt: skip
        """Compute pending tokens after the first rows of each slot, and add `levels` levels to the chains."""
        call = self._call(range(len(batch)), self._width(max(map(len, pending))), levels)
        call.fill(starts, pending, self._positions)
        call.sample(self._noise, batch, level)
        self._run(DRAFT, call.work)
        self._device.wait()
        for slot, (seq, chain) in enumerate(zip(batch, chains, strict=True)):
            for step in range(levels):
                if chain.left:
                    chain.add(*call.candidate(slot, step))
                    if seq.noise.drawn:
                        chain.logits.append(call.logits(slot, step))

    def _draft_trees(self, batch: Several[Sequence], budgets: Several[Budget], widths: Several[int]) -> list[Tree]:
        """Draft a tree for each sequence, a level a run. Each run computes the rows of all expanded nodes again."""
        steps = [min(budget.depth, self.shape.steps) if budget.nodes else 0 for budget in budgets]
        starts, pending = self._begin(batch, steps)
        trees = [
            GrowingTree.of(seq.tokens[-1], budget, width, min(budget.nodes, self.shape.nodes - 1)) if rows else None
            for seq, budget, width, rows in zip(batch, budgets, widths, pending, strict=True)
        ]
        logits: list[list[FloatArray]] = [[] for _ in batch]
        for level in range(max(steps)):
            began = time.perf_counter()
            if level == 0:
                call = self._call(range(len(batch)), self._width(max(map(len, pending))), 1)
                call.fill(starts, pending, self._positions)
            else:
                rows = self._width(max(len(tree.rows) if tree else 0 for tree in trees))
                call = self._call(range(len(batch)), rows, 1, max(widths))
                after = [start + len(rows) for start, rows in zip(starts, pending, strict=True)]
                call.fill_tree(after, trees)
            call.sample(self._noise, batch, level)
            self._run(DRAFT, call.work)
            self._device.wait()
            for slot, tree in enumerate(trees):
                if tree and tree.ends:
                    if batch[slot].noise.drawn:
                        logits[slot].append(call.logits(slot, 0))
                    tree.grow(*call.candidates(slot), last=level + 1 >= steps[slot])
            if level:
                self._learn_step_ms((time.perf_counter() - began) * 1e3)
            if not any(tree and tree.ends for tree in trees):
                break
        made = []
        for seq, tree, budget, drawn in zip(batch, trees, budgets, logits, strict=True):
            proposal = self._proposal(seq, drawn)
            made.append(within(tree.best(proposal), budget) if tree else root_only(seq.tokens[-1]))
        return made

    def _proposal(self, seq: Sequence, rows: Several[FloatArray]) -> RowsProposal | None:
        """Return the distributions of a chain's tokens, if they were drawn."""
        if not seq.noise.drawn:
            return None
        scale = seq.noise.logit_scale(self.shape.draft_logit_scale)
        return RowsProposal(rows, scale, self._host_tables.get(names.DRAFT_VOCABULARY))

    def _tree(self, seq: Sequence, chain: Chain) -> Tree:
        """Return the draft as a tree on the host."""
        nodes = len(chain.tokens)
        if nodes == 1:
            return root_only(seq.tokens[-1])
        proposal = self._proposal(seq, chain.logits)
        tokens, log_probs = np.array(chain.tokens, np.int64), np.array(chain.log_probs, np.float32)
        return DraftTree(tokens, np.arange(-1, nodes - 1), log_probs, Draws.of(proposal, nodes))

    def _catch_up(self, seq: Sequence, slot: int, end: int) -> None:
        """Compute rows of the first `end` tokens of a sequence until at most CATCH_UP are pending."""
        state: Drafting = seq.drafting[self]
        state.commit(seq.tokens)
        while end - state.cache_len > CATCH_UP:
            call = self._call(range(slot, slot + 1), self._width(CATCH_UP), 1)
            call.fill([state.cache_len], [seq.tokens[state.cache_len : state.cache_len + CATCH_UP]], self._positions)
            self._run(DRAFT, call.work)
            state.cache_len += CATCH_UP

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft of a few levels, and 0: nothing is resampled."""
        self._noise.clear()
        start, pending, left = min(kv_len, self.verifier.max_model_len - CATCH_UP), [0] * rows, _MEASURED_STEPS
        self._device.wait()
        started = time.perf_counter()
        while left:
            levels = self._levels(left, may_stop=True)
            call = self._call(range(1), self._width(len(pending)), levels)
            call.fill([start], [pending], self._positions)
            call.work()
            self._device.wait()
            start, pending, left = start + len(pending) + levels - 1, [0], left - levels
        return (time.perf_counter() - started) * 1e3, 0.0

    def _learn_step_ms(self, taken_ms: float) -> None:
        """Update the time of a level. A call that was interrupted counts as one of twice the known time."""
        known_ms = self.step_ms or taken_ms
        self.step_ms = known_ms + _LEARN * (min(taken_ms, 2 * known_ms) - known_ms)

    def _call(self, slots: range, width: int, levels: int, ends: int = 1) -> _Call:
        """Return the work of `levels` runs over `width` rows of which `ends` get candidates."""
        key = slots, width, levels, ends
        call = self._calls.get(key)
        if call is None:
            alone = slots.start > 0
            given = {name: slots_of(buffer, slots) for name, buffer in self._state.items()}
            given |= {**(self._noise.without if alone else self._noise.buffers(len(slots))), **self._tables}
            shape = len(slots), ends, self.shape.draft_vocabulary
            logits = [buffer.part(*shape) for buffer in self._level_logits(levels)]
            call = _Call(self._device, self._programs[DRAFT], len(slots), width, given, logits)
            self._calls.add(key, call)
        return call

    def _level_logits(self, levels: int) -> list[Buffer]:
        """Return memory for the logits of each level of a work, which all works share."""
        while len(self._logits) < levels:
            shape = self.verifier.max_num_seqs, self.shape.width, self.shape.draft_vocabulary
            self._logits.append(self._device.empty("float32", *shape))
        return self._logits[:levels]

    def _warm(self) -> None:
        """Run the usual works until the device replays them as graphs."""
        self.verifier.warm()
        slots = self.verifier.max_num_seqs
        works = [(range(slot, slot + 1), CATCH_UP, 1) for slot in range(min(slots, WARM_SLOTS))]
        for sequences in sorted({1, slots}, reverse=True):
            works += [(range(sequences), width, self._levels(STOP_STEPS, True)) for width in (1, names.DRAFT_WIDTHS[0])]
        for taken, width, levels in works:
            call = self._call(taken, width, levels)
            for _ in range(2):
                call.fill([0] * len(taken), [[0]] * len(taken), self._positions)
                call.work()
                self._device.wait()


class _Call:
    """Runs of the graph, one a level, as one work. The first computes `width` rows of each slot, the others one.

    given: buffers of the slots' state, factors and tables.   logits: memory for those of each level, [B, R, H]: R rows
    of a slot get candidates, one if there are several levels.
    """

    def __init__(
        self, device: Device, program: Program, sequences: int, width: int, given: Mapping[str, Buffer],
        logits: Several[Buffer],
    ) -> None:  # fmt: skip
        self.width = width
        ends = logits[0].shape[1]
        fields: dict[str, tuple[int, ...]] = {names.TOKEN_IDS: (sequences, width), names.DRAWN: (sequences,)}
        for level in range(len(logits)):
            rows = width if level == 0 else 1
            fields |= {
                _at(names.POSITIONS, level): (sequences, rows), _at(names.CACHE_LEN, level): (sequences,),
                _at(names.KV_LEN, level): (1,), _at(names.OUTPUT_ROWS, level): (sequences, ends),
                _at(names.NOISE_KEYS, level): (sequences, ends, 2),
            }  # fmt: skip
        self._host_inputs = device.host_inputs(**fields)
        self._logits = logits
        self._keys = np.ones((sequences, len(logits), 2), np.int64)
        self._chosen: list[tuple[HostOutputs, HostOutputs]] = []
        runs, fetches = [], []
        tokens = self._host_inputs.buffers[names.TOKEN_IDS]
        for level in range(len(logits)):
            known = {**given, names.TOKEN_IDS: tokens, names.LOGITS: self._logits[level]}
            for name in (names.POSITIONS, names.CACHE_LEN, names.KV_LEN, names.OUTPUT_ROWS, names.NOISE_KEYS):
                known[name] = self._host_inputs.buffers[_at(name, level)]
            known[names.DRAWN] = self._host_inputs.buffers[names.DRAWN]
            rows = width if level == 0 else 1
            sizes = {"B": sequences, "T": rows, "R": ends}
            for spec in (*program.inputs, *program.outputs):
                if spec.in_place_of:
                    known[spec.name] = known[spec.in_place_of]
                elif spec.name not in known:
                    known[spec.name] = device.empty(spec.dtype, *sized(spec.shape, sizes))
            known[names.TREE_MASK].write(np.tile(np.tri(rows, dtype=np.bool_), (sequences, 1, 1)))
            self._mask = known[names.TREE_MASK]
            runs.append(program.bind({spec.name: known[spec.name] for spec in (*program.inputs, *program.outputs)}))
            outputs = [device.host_outputs(known[name]) for name in (names.CANDIDATES, names.CANDIDATE_LOG_PROBS)]
            self._chosen.append((outputs[0], outputs[1]))
            fetches += [output.fetch for output in outputs]
            tokens = known[names.CANDIDATES].part(sequences, 1)
        self.work = device.chain([self._host_inputs.send, *runs, *fetches])

    def fill(self, starts: Several[int], pending: Several[Several[int]], positions: Array) -> None:
        """Set the next run's rows: pending tokens after the first rows of each slot. A slot may have none."""
        values, levels = self._host_inputs.open(), len(self._chosen)
        tokens = values[names.TOKEN_IDS]
        for slot, (start, rows) in enumerate(zip(starts, pending, strict=True)):
            tokens[slot, : len(rows)] = rows
            tokens[slot, len(rows) :] = 0
            values[_at(names.POSITIONS, 0)][slot] = positions[start : start + self.width]
            values[_at(names.CACHE_LEN, 0)][slot] = start
            values[_at(names.OUTPUT_ROWS, 0)][slot] = max(len(rows) - 1, 0)
            row = start + max(len(rows), 1)
            for level in range(1, levels):
                values[_at(names.POSITIONS, level)][slot] = positions[row]
                values[_at(names.CACHE_LEN, level)][slot] = row
                row += 1
        for level in range(levels):
            rows_of = self.width if level == 0 else 1
            values[_at(names.KV_LEN, level)][0] = values[_at(names.CACHE_LEN, level)].max() + rows_of

    def fill_tree(self, starts: Several[int], trees: Several[GrowingTree | None]) -> None:
        """Set the next run's rows: the expanded nodes of each slot's tree, after its first rows."""
        values = self._host_inputs.open()
        mask = np.tile(np.eye(self.width, dtype=np.bool_), (len(starts), 1, 1))
        for name in (names.TOKEN_IDS, _at(names.OUTPUT_ROWS, 0)):
            values[name][...] = 0
        for slot, (start, tree) in enumerate(zip(starts, trees, strict=True)):
            values[_at(names.POSITIONS, 0)][slot] = start
            values[_at(names.CACHE_LEN, 0)][slot] = start
            if tree is not None and (rows := len(tree.rows)):
                values[names.TOKEN_IDS][slot, :rows] = [tree.tokens[node] for node in tree.rows]
                values[_at(names.POSITIONS, 0)][slot, :rows] = [start - 1 + tree.depths[node] for node in tree.rows]
                values[_at(names.OUTPUT_ROWS, 0)][slot, : len(tree.ends)] = range(rows - len(tree.ends), rows)
                mask[slot, :rows, :rows] = tree.mask()
        values[_at(names.KV_LEN, 0)][0] = max(starts) + self.width
        self._mask.write(mask)

    def sample(self, noise: SlotNoise, batch: Several[Sequence], first: int) -> None:
        """Set the noise of the next run, whose first level is level `first` of its draft."""
        values = self._host_inputs.open()
        noise.set(batch, {names.NOISE_KEYS: self._keys, names.DRAWN: values[names.DRAWN]}, first)
        for level in range(self._keys.shape[1]):
            values[_at(names.NOISE_KEYS, level)][...] = self._keys[:, level, None]

    def candidate(self, slot: int, level: int) -> tuple[int, float]:
        """Return the best token of a level and its log probability, after a wait for the device."""
        tokens, log_probs = self._chosen[level]
        return int(tokens.values[slot, 0, 0]), float(log_probs.values[slot, 0, 0])

    def candidates(self, slot: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log probabilities of the candidates of each of a slot's R rows, [R][k]."""
        tokens, log_probs = self._chosen[0]
        return tokens.values[slot].tolist(), log_probs.values[slot].tolist()

    def logits(self, slot: int, level: int) -> FloatArray:
        """Return a copy of a level's logits after its first row with candidates, [H]."""
        buffer = slots_of(self._logits[level], range(slot, slot + 1))
        read: FloatArray = buffer.read()[0, 0].copy()
        return read


def _at(name: str, level: int) -> str:
    """Return the name of the host input of a level."""
    return f"{name}.{level}"


DRAFTER = DraftModelDrafter
