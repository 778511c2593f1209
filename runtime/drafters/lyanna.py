"""Lyanna in the runtime: drafts from predicted hidden states, and resamples what a verification left over.

Chen et al., "Make Every Draft Count", §5 and Algorithms 1 and 2; the graphs do both. A draft spends its chain step by
step: after j accepted tokens the bonus takes step j + 1, and the logits of those behind it are good for another tree.

The drafter has its own KV. Its rows are pairs of the verifier's feature at a position and the token after it; those of
tokens committed since the last draft wait, and go in with the next one, in chunks where there are many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from redraft import names
from redraft.engines.base import Array, Call, Engine
from redraft.methods.lyanna import METHOD, LyannaOptions, LyannaShape
from redraft.names import DRAFT, RESAMPLE
from redraft.runtime.drafters.base import Drafter, OpenEngine
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import Features, Verifier
from redraft.types import Budget, DraftTree, FloatArray, Outcome

CATCH_UP = names.CATCH_UP_ROWS
_ROW_STEP = 16
"""More rows than this are padded to a multiple of it, so that few shapes are prepared."""


@dataclass(slots=True)
class PendingFeatures:
    """Of one sequence: rows in the drafter's KV, feature rows that wait to go there, steps used of the last draft."""

    used: int
    cache_len: int = 0
    pending: int = 0
    features: FloatArray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def append(self, rows: FloatArray) -> None:
        """Keep a copy of feature rows [r, n]."""
        needed = self.pending + len(rows)
        if needed > len(self.features):
            grown = np.empty((max(2 * needed, CATCH_UP), rows.shape[1]), np.float32)
            if self.pending:
                grown[: self.pending] = self.features[: self.pending]
            self.features = grown
        self.features[self.pending : needed] = rows
        self.pending = needed

    def shift(self, rows: int) -> None:
        """The first `rows` pending rows went in."""
        self.cache_len += rows
        self.pending -= rows
        self.features[: self.pending] = self.features[rows : rows + self.pending]


class LyannaDrafter(Drafter):
    """See the module. `shape` is that of its graphs; `tables` holds its token information by name."""

    has_engines = True

    def __init__(
        self, verifier: Verifier, shape: LyannaShape, draft_engine: Engine, resample_engine: Engine | None,
        tables: Mapping[str, Array], config: LyannaOptions | None = None, name: str = METHOD.id,
    ) -> None:  # fmt: skip
        super().__init__(verifier)
        self.config = config or LyannaOptions()
        self.name = name
        self.shape = shape
        max_model_len = verifier.max_model_len + CATCH_UP + shape.steps
        self._kv = np.zeros((2, verifier.max_num_seqs, shape.kv_heads, max_model_len, shape.head_dim), shape.dtype)
        self._chain_logits = np.zeros((verifier.max_num_seqs, shape.steps, shape.vocabulary), np.float32)
        self._draft_engine, self._resample_engine = draft_engine, resample_engine
        draft_engine.bind(names.key_cache(0), self._kv[0])
        draft_engine.bind(names.value_cache(0), self._kv[1])
        draft_engine.bind(names.CHAIN_LOGITS, self._chain_logits)
        if resample_engine is not None:
            resample_engine.bind(names.CHAIN_LOGITS, self._chain_logits)
        for name, table in tables.items():
            for engine in (draft_engine, resample_engine):
                if engine is not None:
                    engine.bind(name, table)
        self._fixed_batch = all("B" not in spec.shape for spec in draft_engine.inputs)

    @classmethod
    def create(cls, verifier: Verifier, options: Mapping[str, Any], engines: OpenEngine | None = None) -> Self:
        """Return the bundle's drafter, with options as `LyannaOptions`. Raises UsageError, BundleError."""
        assert engines is not None
        built = engines.built()
        single = verifier.max_num_seqs == 1 and f"{DRAFT}{names.SINGLE}" in built.record.graphs
        shape = built.shape
        return cls(
            verifier,
            shape,
            engines(built.graph(f"{DRAFT}{names.SINGLE}" if single else DRAFT)),
            OpenEngine(engines.bundle, 1)(built.graph(RESAMPLE)) if shape.steps > 1 else None,  # too short to share
            engines.bundle.tables(built.id),
            METHOD.parse_options(options),
            built.id,
        )

    def begin(self, seq: Sequence) -> None:
        """See `Drafter.begin`."""
        seq.drafting = PendingFeatures(used=self.shape.steps)

    def prefilled(self, seq: Sequence, start: int, features: Features) -> None:
        """See `Drafter.prefilled`. All rows go in but the last few, the last of which lacks its token."""
        pending: PendingFeatures = seq.drafting
        pending.append(features[names.LAST_HIDDEN_STATE])
        self._catch_up([seq], [True])

    def accept(self, seq: Sequence, tree: DraftTree, outcome: Outcome, features: Features) -> None:
        """See `Drafter.accept`."""
        pending: PendingFeatures = seq.drafting
        rows = features[names.LAST_HIDDEN_STATE]
        pending.append(rows[[0, *outcome.path]] if outcome.path else rows[:1])
        pending.used += len(outcome.path) + 1

    def remaining(self, seq: Sequence) -> int:
        """See `Drafter.remaining`."""
        pending: PendingFeatures = seq.drafting
        remaining = self.shape.steps - pending.used
        return remaining if self.config.resample and remaining > self.config.threshold else 0

    def draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.draft`. Raises ValueError where nothing was committed since the last draft."""
        wanted = [budget.nodes > 0 for budget in budgets]
        pendings: list[PendingFeatures] = [seq.drafting for seq in batch]
        if any(yes and not pending.pending for pending, yes in zip(pendings, wanted, strict=True)):
            raise ValueError("nothing was committed since the last draft of a sequence")
        self._catch_up(batch, wanted)
        call = self._run_draft(batch, [b.pending if yes else 0 for b, yes in zip(pendings, wanted, strict=True)])
        for pending, yes in zip(pendings, wanted, strict=True):
            if yes:
                pending.used = 0
        return self._trees(call, batch, budgets, [self.shape.nodes] * len(batch))

    def resample(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """See `Drafter.resample`."""
        assert self._resample_engine is not None
        call = self._resample_engine.prepare(B=len(batch))
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            pending: PendingFeatures = seq.drafting
            call.inputs[names.FIRST_STEP][slot] = pending.used if budget.nodes else 1
            call.inputs[names.TOKENS][slot] = seq.tokens[-1]
        with self.verifier.ranges.call(names.drafter_graph(self.name, RESAMPLE)):
            call.run()
        return self._trees(call, batch, budgets, call.outputs[names.TREE_COUNT].tolist())

    def move(self, seq: Sequence, source: int, target: int) -> None:
        """See `Drafter.move`."""
        pending: PendingFeatures = seq.drafting
        self._kv[:, target, :, : pending.cache_len] = self._kv[:, source, :, : pending.cache_len]
        self._chain_logits[target] = self._chain_logits[source]

    def measure_ms(self, rows: int, kv_len: int) -> tuple[float, float]:
        """See `Drafter.measure_ms`."""
        cache_len = min(kv_len, self.verifier.max_model_len - rows)
        call = self._draft_call(1, rows)
        call.inputs[names.NUM_PENDING][:] = rows
        call.inputs[names.CACHE_LEN][:] = cache_len
        call.inputs[names.KV_LEN][0] = cache_len + rows
        call.inputs[names.POSITIONS][:] = np.arange(cache_len, cache_len + rows)
        drafted = _seconds(call)
        if self._resample_engine is None:
            return drafted * 1e3, 0.0
        again = self._resample_engine.prepare(B=1)
        again.inputs[names.FIRST_STEP][:] = 1
        return drafted * 1e3, _seconds(again) * 1e3

    def _catch_up(self, batch: Several[Sequence], wanted: Several[bool]) -> None:
        """Put pending rows into the KV until no wanted sequence has more than CATCH_UP of them."""
        while any(
            full := [CATCH_UP if yes and seq.drafting.pending > CATCH_UP else 0
                     for seq, yes in zip(batch, wanted, strict=True)]
        ):  # fmt: skip
            self._run_draft(batch, full)

    def _run_draft(self, batch: Several[Sequence], rows: list[int]) -> Call:
        """One call in which sequence i brings its first rows[i] pending rows; those without any stay as they are."""
        most = max(rows)
        width = most if most <= _ROW_STEP else -(-most // _ROW_STEP) * _ROW_STEP
        call = self._draft_call(len(batch), width)
        inputs = call.inputs
        kept = {slot: self._chain_logits[slot].copy() for slot, (seq, count) in enumerate(zip(batch, rows, strict=True))
                if not count and seq.drafting.used < self.shape.steps}  # fmt: skip
        for slot, (seq, count) in enumerate(zip(batch, rows, strict=True)):
            pending: PendingFeatures = seq.drafting
            cache_len = pending.cache_len
            inputs[names.NUM_PENDING][slot] = max(count, 1)
            inputs[names.CACHE_LEN][slot] = cache_len
            inputs[names.POSITIONS][slot] = np.arange(cache_len, cache_len + width)
            if count:
                inputs[names.FEATURE_ROWS][slot, :count] = pending.features[:count]
                inputs[names.TOKENS][slot, :count] = seq.tokens[cache_len + 1 : cache_len + 1 + count]
        inputs[names.KV_LEN][0] = max([seq.drafting.cache_len for seq in batch]) + width
        with self.verifier.ranges.call(names.drafter_graph(self.name, DRAFT)):
            call.run()
        for slot, logits in kept.items():
            self._chain_logits[slot] = logits
        for seq, count in zip(batch, rows, strict=True):
            seq.drafting.shift(count)
        return call

    def _draft_call(self, sequences: int, rows: int) -> Call:
        sizes = {"M": rows} if self._fixed_batch else {"B": sequences, "M": rows}
        return self._draft_engine.prepare(**sizes)

    def _trees(
        self, call: Call, batch: Several[Sequence], budgets: Several[Budget], counts: list[int]
    ) -> list[DraftTree]:
        """The call's trees within the budgets, copied out of its arrays."""
        trees = []
        for slot, (seq, budget) in enumerate(zip(batch, budgets, strict=True)):
            if not budget.nodes:
                trees.append(root_only(seq.tokens[-1]))
                continue
            tree = DraftTree(
                call.outputs[names.TREE_TOKENS][slot].copy(),
                call.outputs[names.TREE_PARENTS][slot].copy(),
                call.outputs[names.TREE_LOG_PROBS][slot].copy(),
            )
            trees.append(within(tree.first(counts[slot] - 1), budget))
        return trees


def within(tree: DraftTree, budget: Budget) -> DraftTree:
    """The nodes of a tree, likeliest first, that a budget has room for: as deep, as wide a level, and as many."""
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


def _seconds(call: Call) -> float:
    started = time.perf_counter()
    call.run()
    return time.perf_counter() - started


DRAFTER = LyannaDrafter
