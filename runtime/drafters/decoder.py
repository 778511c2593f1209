"""Drafters that are decoders of their own: they draft a token at a time, and stop as soon as a budget says so.

Its rows are tokens: row r of its KV is that of the token at position r, so it catches up by tokens, and by what a
subclass prepares for their rows. Rows of drafted tokens stay valid if the same tokens are committed, whatever committed
them. The others are overwritten.

One run of the graph computes one level. Runs of a chain are one work of the device, in which each run reads the token
that the one before chose. The host reads probabilities between two works, so they decide where a draft can stop. The
host runs one level at a time if the budget may stop the draft: a run costs ONNX Runtime 6 microseconds beyond its
nodes, so a graph that unrolls levels would gain nothing. On other devices a work has `STOP_STEPS` levels then, since
each wait costs as much as a level or two. Drafts of a fixed length take the fewest works of `STEP_COUNTS` levels.
"""

# pylint: disable=too-many-lines  # chains and trees of one family
from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, slots_of
from redraft.engines.drafters import BuiltDrafter
from redraft.lru import LruCache
from redraft.names import DRAFT
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.drafters.decoder_call import DraftCall
from redraft.runtime.drafters.engine import CATCH_UP, MOST_WAITING, EngineDrafter
from redraft.runtime.drafters.growing_tree import Chain, GrowingTree
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.verifier import WARM_SLOTS, Verifier
from redraft.runtime.trees.tree import root_only, within
from redraft.types import Budget, DraftTree, Draws, FloatArray, Outcome, Tree

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

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep the rows of drafted tokens that were committed. The last token's row is computed again."""
        most = len(tokens) - 1
        for token in self.drafted:
            if self.cache_len >= most or tokens[self.cache_len] != token:
                break
            self.cache_len += 1
        self.drafted = []


class DecoderDrafter(EngineDrafter):
    """Drafts chains, or trees if its shape is wide, with a decoder of its own, from tokens alone."""

    step_graphs: ClassVar[tuple[str, ...]] = ()
    """Graphs of a step that it runs."""

    def __init__(self, verifier: Verifier, built: BuiltDrafter, tables: Mapping[str, Array], options: Any) -> None:
        """Load its programs. Raises as `EngineDrafter`."""
        super().__init__(verifier, built, tables, options, self.step_graphs)
        self._calls: LruCache[tuple[range, int, int, int, bool], DraftCall] = LruCache(
            self._most_calls, self._device.wait
        )
        self._positions = np.minimum(self._positions, verifier.max_model_len - 1)
        """Position of each row. No token has a row beyond the context; those of padding must have some position."""
        self._logits: list[Buffer] = []
        self._open()

    def _open(self) -> None:
        """Prepare calls before the first request, with all programs loaded."""
        if self._device.asynchronous:
            self._warm()

    def begin(self, seq: Request) -> None:
        seq.drafting[self] = Drafting()

    def resume(self, seq: Request, earlier: Request, rows: int) -> int:
        """Take over the rows of tokens in common."""
        state: Drafting | None = earlier.drafting.get(self)
        if state is None:
            return super().resume(seq, earlier, rows)
        state.commit(earlier.tokens)
        self.begin(seq)
        seq.drafting[self].cache_len = min(state.cache_len, rows)
        return rows

    def prefilled(self, seq: Request, slot: int, start: int, tokens: int) -> None:
        """Compute the rows of the prompt so far that may not wait."""
        self._catch_up(seq, slot, start + tokens, self._most_waiting)

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Compute rows of a request that does not draft before too many wait for one step."""
        if seq.finish_reason is None:
            self._catch_up(seq, seq.slot, len(seq.tokens), MOST_WAITING)

    def waiting(self, seq: Request) -> int:
        computed: int = seq.drafting[self].cache_len
        return len(seq.tokens) - computed - CATCH_UP

    def catch_up(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> None:
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            if budget.nodes:
                self._catch_up(seq, slot, len(seq.tokens))

    def move(self, seq: Request, source: int, target: int) -> None:
        """Copy the drafter's rows of `seq` to another slot, also those of drafted tokens that were committed."""
        seq.drafting[self].commit(seq.tokens)
        super().move(seq, source, target)

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """Draft a chain for each sequence, up to the token that ends it by its budget, or a tree if the shape is wide.

        Drawn candidates are chains: a tree's logits after equal tokens of a level differ, which no `Proposal` can tell.
        """
        widths = [
            1 if seq.noise.drawn else min(budget.width, self.shape.width)
            for seq, budget in zip(batch, budgets, strict=True)
        ]
        trees: list[Tree] = [root_only(seq.tokens[-1]) for seq in batch]
        if runs := self._runs(budgets):
            slots = range(runs[0].start, runs[-1].stop)  # each call reads all weights, so that idle slots cost less
            part = slice(slots.start, slots.stop)
            if max(widths) > 1:
                trees[part] = self._draft_trees(slots, batch[part], budgets[part], widths[part])
            else:
                trees[part] = self._draft_chains(slots, batch[part], budgets[part])
        return trees

    def _draft_chains(self, slots: range, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        steps = self.shape.steps
        chains = [Chain.of(seq, budget, steps) for seq, budget in zip(batch, budgets, strict=True)]
        if not any(chain.left for chain in chains):
            return [root_only(seq.tokens[-1]) for seq in batch]
        starts, pending = self._begin(slots, batch, [chain.left for chain in chains])
        level = 0
        while left := max(chain.left for chain in chains):
            began = time.perf_counter()
            levels = self._levels(left, any(chain.left and chain.may_stop for chain in chains))
            self._extend(slots, batch, chains, starts, pending, level, levels)
            taken_ms = (time.perf_counter() - began) * 1e3 / levels
            if level or not self.step_ms or taken_ms < self.step_ms:  # a first work reads pending tokens: a bound
                self._learn_step_ms(taken_ms)
            for place, rows in enumerate(pending):
                if rows:
                    starts[place] += len(rows) + levels - 1
                    pending[place] = chains[place].tokens[-1:]
            level += levels
        for seq, chain, rows in zip(batch, chains, pending, strict=True):
            if rows:
                seq.drafting[self].drafted = chain.tokens[1:level]
        return [self._tree(seq, chain) for seq, chain in zip(batch, chains, strict=True)]

    def _begin(
        self, slots: range, batch: Sequence[Request], levels: Sequence[int]
    ) -> tuple[list[int], list[list[int]]]:
        """Return the valid rows of each slot, and the tokens to compute after them; none for slots without a draft."""
        starts, pending = [], []
        for slot, seq, left in zip(slots, batch, levels, strict=True):
            state: Drafting | None = seq.drafting.get(self)
            rows: list[int] = []
            if state is not None and left:
                self._catch_up(seq, slot, len(seq.tokens))
                rows = seq.tokens[state.cache_len :]
            elif state is not None:
                state.commit(seq.tokens)
            starts.append(state.cache_len if state else 0)
            pending.append(rows)
        self._prepare(slots, starts, pending, batch)
        for seq, rows in zip(batch, pending, strict=True):
            if rows:
                seq.drafting[self].cache_len += len(rows)
        return starts, pending

    def _prepare(
        self,
        slots: range,
        starts: Sequence[int],
        pending: Sequence[Sequence[int]],
        batch: Sequence[Request] = (),
    ) -> None:
        """Compute what the rows of the next call read: these pending tokens after the first rows of each slot.

        batch: the sequences in these slots, if the rows are theirs. A drafter that reads tokens alone needs nothing.
        """

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

    def _extend(  # noqa: PLR0913 - the slots of a call, and what each of them has
        self, slots: range, batch: Sequence[Request], chains: Sequence[Chain], starts: Sequence[int],
        pending: Sequence[Sequence[int]], level: int, levels: int,
    ) -> None:  # fmt: skip
        """Compute pending tokens after the first rows of each slot, and add `levels` levels to the chains."""
        call = self._first_call(slots, starts, pending, levels)
        call.sample(self._noise, slots, batch, level)
        self._run(DRAFT, call.work)
        self._device.wait()
        for place, (seq, chain) in enumerate(zip(batch, chains, strict=True)):
            for step in range(levels):
                if chain.left:
                    chain.add(*call.candidate(place, step))
                    if seq.noise.drawn:
                        chain.logits.append(call.logits(place, step))

    def _draft_trees(
        self, slots: range, batch: Sequence[Request], budgets: Sequence[Budget], widths: Sequence[int]
    ) -> list[Tree]:
        """Draft a tree for each sequence, a level a run. Each run computes the rows of all expanded nodes again."""
        steps = [min(budget.depth, self.shape.steps) if budget.nodes else 0 for budget in budgets]
        starts, pending = self._begin(slots, batch, steps)
        trees = [
            GrowingTree.of(seq.tokens[-1], budget, width, min(budget.nodes, self.shape.nodes - 1), seq.noise.drawn)
            if rows
            else None
            for seq, budget, width, rows in zip(batch, budgets, widths, pending, strict=True)
        ]
        logits: list[list[FloatArray]] = [[] for _ in batch]
        for level in range(max(steps)):
            began = time.perf_counter()
            if level:
                call = self._level_call(slots, starts, pending, trees, max(widths))
            else:
                call = self._first_call(slots, starts, pending)
            call.sample(self._noise, slots, batch, level)
            self._run(DRAFT, call.work)
            self._device.wait()
            for place, tree in enumerate(trees):
                if tree and tree.ends:
                    if batch[place].noise.drawn:
                        logits[place].append(call.logits(place, 0))
                    tree.grow(*call.candidates(place), last=level + 1 >= steps[place])
            if level:
                self._learn_step_ms((time.perf_counter() - began) * 1e3)
            if not any(tree and tree.ends for tree in trees):
                break
        return [
            within(tree.whole(self._proposal(seq, drawn)), replace(budget, nodes=tree.most))
            if tree
            else root_only(seq.tokens[-1])
            for seq, tree, budget, drawn in zip(batch, trees, budgets, logits, strict=True)
        ]

    def _first_call(
        self, slots: range, starts: Sequence[int], pending: Sequence[Sequence[int]], levels: int = 1
    ) -> DraftCall:
        """Return the call that computes pending tokens after the first rows of each slot, with its rows set."""
        call = self._call(slots, self._width(max(map(len, pending))), levels)
        call.fill(starts, pending, self._positions)
        return call

    def _level_call(
        self,
        slots: range,
        starts: Sequence[int],
        pending: Sequence[Sequence[int]],
        trees: Sequence[GrowingTree | None],
        ends: int,
    ) -> DraftCall:
        """Return the call that computes the trees' expanded nodes after these rows, with its rows set."""
        width = super()._width(max(len(tree.rows) if tree else 0 for tree in trees))
        call = self._call(slots, width, 1, ends)
        call.fill_tree([start + len(rows) for start, rows in zip(starts, pending, strict=True)], trees)
        return call

    def _proposal(self, seq: Request, rows: Sequence[FloatArray]) -> ChainProposal | None:
        """Return the distributions of a chain's tokens, if they were drawn."""
        if not seq.noise.drawn:
            return None
        scale = seq.noise.logit_scale(self.shape.draft_logit_scale)
        return ChainProposal(lambda: rows, scale, self._host_tables.get(names.DRAFT_VOCABULARY))

    def _tree(self, seq: Request, chain: Chain) -> Tree:
        """Return the draft as a tree on the host."""
        nodes = len(chain.tokens)
        if nodes == 1:
            return root_only(seq.tokens[-1])
        proposal = self._proposal(seq, chain.logits)
        tokens, log_probs = np.array(chain.tokens, np.int64), np.array(chain.log_probs, np.float32)
        return DraftTree(tokens, np.arange(-1, nodes - 1), log_probs, Draws.of(proposal, nodes))

    def _catch_up(self, seq: Request, slot: int, end: int, most: int = CATCH_UP) -> None:
        """Compute rows of the first `end` tokens of a sequence until at most `most` are pending."""
        state: Drafting = seq.drafting[self]
        state.commit(seq.tokens)
        while end - state.cache_len > most:
            self._compute(seq, slot)

    def _compute(self, seq: Request, slot: int) -> None:
        """Compute the next CATCH_UP rows of a sequence."""
        state: Drafting = seq.drafting[self]
        slots, starts = range(slot, slot + 1), [state.cache_len]
        pending = [seq.tokens[state.cache_len : state.cache_len + CATCH_UP]]
        self._prepare(slots, starts, pending, [seq])
        call = self._call(slots, self._width(CATCH_UP), 1)
        call.fill(starts, pending, self._positions)
        self._run(DRAFT, call.work)
        state.cache_len += CATCH_UP

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """Return milliseconds of a draft of a few levels, and 0: nothing is resampled."""
        self._noise.clear()
        start, pending, left = min(kv_len, self.verifier.max_model_len - CATCH_UP), [0] * rows, _MEASURED_STEPS
        self._device.wait()
        started = time.perf_counter()
        self._prepare(range(1), [start], [pending])
        while left:
            levels = self._levels(left, may_stop=True)
            call = self._first_call(range(1), [start], [pending], levels)
            call.work()
            self._device.wait()
            start, pending, left = start + len(pending) + levels - 1, [0], left - levels
        return (time.perf_counter() - started) * 1e3, 0.0

    def _learn_step_ms(self, taken_ms: float) -> None:
        """Update the time of a level. A call that was interrupted counts as one of twice the known time."""
        known_ms = self.step_ms or taken_ms
        self.step_ms = known_ms + _LEARN * (min(taken_ms, 2 * known_ms) - known_ms)

    def _call(self, slots: range, width: int, levels: int, ends: int = 1) -> DraftCall:
        """Return the work of `levels` runs over `width` rows of which `ends` get candidates."""
        key = slots, width, levels, ends, self._on_one_thread
        return self._calls.get(key, lambda: self._bound(slots, width, levels, ends))

    def _bound(self, slots: range, width: int, levels: int, ends: int) -> DraftCall:
        """Return such a work, bound to buffers."""
        catching_up = self._device.step_graphs and slots.start > 0
        given = {name: slots_of(buffer, slots) for name, buffer in self._state.items()}
        given |= {**(self._noise.without if catching_up else self._noise.buffers(slots)), **self._tables}
        shape = len(slots), ends, self.shape.draft_vocabulary
        logits = [buffer.part(*shape) for buffer in self._level_logits(levels)]
        first, later = ({**given, **self._read(slots, rows)} for rows in (width, 1))
        return DraftCall(self._device, self._draft_program(len(slots) * width), len(slots), width, first, later, logits)

    def _read(self, slots: range, width: int) -> Mapping[str, Buffer]:
        """Return the buffers that `_prepare` fills, for a run over `width` rows of these slots."""
        return {}

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
            starts, pending = [0] * len(taken), [[0] * width] * len(taken)
            for _ in range(2):
                self._prepare(taken, starts, pending)
                call.fill(starts, pending, self._positions)
                call.work()
                self._device.wait()


DRAFTER = DecoderDrafter
