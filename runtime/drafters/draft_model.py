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
from math import log
from typing import Any

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, HostOutputs, Program, sized, slots_of
from redraft.methods.draft_model import METHOD
from redraft.names import DRAFT
from redraft.runtime.drafters.engine import CATCH_UP, MOST_CALLS, EngineDrafter
from redraft.runtime.drafters.proposals import RowsProposal
from redraft.runtime.drafters.slot_noise import SlotNoise
from redraft.runtime.recent import Recent
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
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
    def of(cls, root: int, budget: Budget, steps: int) -> Chain:
        """Return the chain of the root alone."""
        left = min(budget.depth, budget.nodes, steps) if budget.width else 0
        return cls(left, _log(budget.confidence or 0.0), _log(budget.share), [root])

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


def _log(share: float) -> float:
    return log(share) if share > 0 else -np.inf


class DraftModelDrafter(EngineDrafter):
    """Drafts chains with a decoder of its own."""

    method = METHOD

    def __init__(self, verifier: Verifier, shape: Any, tables: Mapping[str, Array], options: Any, name: str) -> None:
        """Load its program. Raises as `EngineDrafter`."""
        super().__init__(verifier, shape, tables, options, name, METHOD.spare_rows)
        most_calls = MOST_CALLS * -(-verifier.max_num_seqs // 4)
        self._calls: Recent[tuple[range, int, int], _Call] = Recent(most_calls, self._device.wait)
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
        """Draft a chain for each sequence, up to the token that ends it by its budget."""
        steps = self.shape.steps
        chains = [Chain.of(seq.tokens[-1], budget, steps) for seq, budget in zip(batch, budgets, strict=True)]
        if not any(chain.left for chain in chains):
            return [root_only(seq.tokens[-1]) for seq in batch]
        starts, pending = self._begin(batch, chains)
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

    def _begin(self, batch: Several[Sequence], chains: Several[Chain]) -> tuple[list[int], list[list[int]]]:
        """Return the valid rows of each slot, and the tokens to compute after them; none for slots without a draft."""
        starts, pending = [], []
        for slot, (seq, chain) in enumerate(zip(batch, chains, strict=True)):
            state: Drafting | None = seq.drafting.get(self)
            rows: list[int] = []
            if state is not None and chain.left:
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

    def _tree(self, seq: Sequence, chain: Chain) -> Tree:
        """Return the draft as a tree on the host."""
        nodes = len(chain.tokens)
        if nodes == 1:
            return root_only(seq.tokens[-1])
        proposal = None
        if seq.noise.drawn:
            scale = seq.noise.logit_scale(self.shape.draft_logit_scale)
            proposal = RowsProposal(chain.logits, scale, self._host_tables.get(names.DRAFT_VOCABULARY))
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
        call = self._call(range(1), self._width(rows), _MEASURED_STEPS)
        call.fill([min(kv_len, self.verifier.max_model_len - call.width)], [[0] * rows], self._positions)
        self._device.wait()
        started = time.perf_counter()
        call.work()
        self._device.wait()
        return (time.perf_counter() - started) * 1e3, 0.0

    def _learn_step_ms(self, taken_ms: float) -> None:
        self.step_ms += (_LEARN if self.step_ms else 1.0) * (min(taken_ms, 2 * self.step_ms or taken_ms) - self.step_ms)

    def _call(self, slots: range, width: int, levels: int) -> _Call:
        key = slots, width, levels
        call = self._calls.get(key)
        if call is None:
            alone = slots.start > 0
            given = {name: slots_of(buffer, slots) for name, buffer in self._state.items()}
            given |= {**(self._noise.without if alone else self._noise.buffers(len(slots))), **self._tables}
            call = _Call(self._device, self._programs[DRAFT], len(slots), width, given, self._level_logits(levels))
            self._calls.add(key, call)
        return call

    def _level_logits(self, levels: int) -> list[Buffer]:
        """Return memory for the logits of each level of a work, which all works share."""
        while len(self._logits) < levels:
            shape = self.verifier.max_num_seqs, 1, self.shape.draft_vocabulary
            self._logits.append(self._device.empty("float32", *shape))
        return self._logits[:levels]

    def _warm(self) -> None:
        """Run the usual works until the device replays them as graphs."""
        self.verifier.warm()
        slots = self.verifier.max_num_seqs
        works = [(range(slot, slot + 1), CATCH_UP, 1) for slot in range(min(slots, WARM_SLOTS))]
        for sequences in sorted({1, slots}, reverse=True):
            works += [(range(sequences), width, STOP_STEPS) for width in (1, names.DRAFT_WIDTHS[0])]
        for taken, width, levels in works:
            call = self._call(taken, width, levels)
            for _ in range(2):
                call.fill([0] * len(taken), [[0]] * len(taken), self._positions)
                call.work()
                self._device.wait()


class _Call:
    """Runs of the graph, one a level, as one work. The first computes `width` rows of each slot, the others one.

    given: buffers of the slots' state, factors and tables.   logits: memory for those of each level.
    """

    def __init__(
        self, device: Device, program: Program, sequences: int, width: int, given: Mapping[str, Buffer],
        logits: Several[Buffer],
    ) -> None:  # fmt: skip
        self.width = width
        fields: dict[str, tuple[int, ...]] = {names.TOKEN_IDS: (sequences, width), names.DRAWN: (sequences,)}
        for level in range(len(logits)):
            rows = width if level == 0 else 1
            fields |= {
                _at(names.POSITIONS, level): (sequences, rows), _at(names.CACHE_LEN, level): (sequences,),
                _at(names.KV_LEN, level): (1,), _at(names.OUTPUT_ROWS, level): (sequences, 1),
                _at(names.NOISE_KEYS, level): (sequences, 1, 2),
            }  # fmt: skip
        self._host_inputs = device.host_inputs(**fields)
        self._logits = [buffer.part(sequences, *buffer.shape[1:]) for buffer in logits]
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
            sizes = {"B": sequences, "T": rows, "R": 1}
            for spec in (*program.inputs, *program.outputs):
                if spec.in_place_of:
                    known[spec.name] = known[spec.in_place_of]
                elif spec.name not in known:
                    known[spec.name] = device.empty(spec.dtype, *sized(spec.shape, sizes))
            known[names.TREE_MASK].write(np.tile(np.tri(rows, dtype=np.bool_), (sequences, 1, 1)))
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

    def sample(self, noise: SlotNoise, batch: Several[Sequence], first: int) -> None:
        """Set the noise of the next run, whose first level is level `first` of its draft."""
        values = self._host_inputs.open()
        noise.set(batch, {names.NOISE_KEYS: self._keys, names.DRAWN: values[names.DRAWN]}, first)
        for level in range(self._keys.shape[1]):
            values[_at(names.NOISE_KEYS, level)][:, 0] = self._keys[:, level]

    def candidate(self, slot: int, level: int) -> tuple[int, float]:
        """Return the best token of a level and its log probability, after a wait for the device."""
        tokens, log_probs = self._chosen[level]
        return int(tokens.values[slot, 0, 0]), float(log_probs.values[slot, 0, 0])

    def logits(self, slot: int, level: int) -> FloatArray:
        """Return a copy of the logits of a level, [H]."""
        buffer = slots_of(self._logits[level], range(slot, slot + 1))
        read: FloatArray = buffer.read().reshape(-1)
        return read


def _at(name: str, level: int) -> str:
    """Return the name of the host input of a level."""
    return f"{name}.{level}"


DRAFTER = DraftModelDrafter
