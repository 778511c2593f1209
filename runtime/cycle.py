"""The cycle: draft, verify, commit. Which method drafts, and which engine runs, is not known here."""

from __future__ import annotations

import time
from collections.abc import Sequence as Several

from redraft.runtime.controller import Controller
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import Verifier
from redraft.types import NO_SPECULATION, Budget, DraftTree


class Cycle:
    """Moves a batch of sequences on. Sequence i of a batch sits in the verifier's slot i."""

    def __init__(self, verifier: Verifier, drafter: Drafter, controller: Controller) -> None:
        self.verifier = verifier
        self.drafter = drafter
        self.controller = controller
        self.clock = verifier.clock

    def begin(self, seq: Sequence) -> None:
        """Compute the prompt of `seq` in slot 0 and commit its first token."""
        self.drafter.begin(seq)
        for start, features in self.verifier.prefill(seq):
            self.drafter.prefilled(seq, start, features)
        seq.begin(self.verifier.first_outcome(seq), self.clock)

    def step(self, batch: Several[Sequence]) -> None:
        """One verification for all: every sequence brings a tree and gains at least one token."""
        started = time.perf_counter()
        trees = self.propose(batch)
        outcomes = self.verifier.verify(batch, trees)
        for slot, (seq, tree, outcome) in enumerate(zip(batch, trees, outcomes, strict=True)):
            seq.commit(tree, outcome)
            self.drafter.accept(seq, tree, outcome, self.verifier.features(slot, len(tree)))
            self.controller.observe(seq, tree, outcome)
        self.clock.total += time.perf_counter() - started

    def propose(self, batch: Several[Sequence]) -> list[DraftTree]:
        """What each sequence brings: as much of a tree as its controller finds worth verifying, at least its root."""
        trees = [root_only(seq.tokens[-1]) for seq in batch]
        room = self.verifier.capacity - max([seq.past_len for seq in batch])
        budgets = [fit(self.controller.budget(seq), seq, room) for seq in batch]
        drafting = [slot for slot, budget in enumerate(budgets) if budget.nodes]
        if drafting:
            started = time.perf_counter()
            drafts = self._draft([batch[slot] for slot in drafting], [budgets[slot] for slot in drafting])
            for slot, draft in zip(drafting, drafts, strict=True):
                trees[slot] = self.controller.choose(batch[slot], draft)
            self.clock.proposal = time.perf_counter() - started
        return trees

    def _draft(self, batch: Several[Sequence], budgets: Several[Budget]) -> list[DraftTree]:
        """A tree for each sequence: resampled where one is worth it, else fresh."""
        started = time.perf_counter()
        trees = self.drafter.resample(batch, budgets)
        resampled = time.perf_counter()
        rest = [i for i, tree in enumerate(trees) if tree is None]
        fresh = iter(self.drafter.draft([batch[i] for i in rest], [budgets[i] for i in rest]) if rest else ())
        self.clock.resample += resampled - started
        self.clock.draft += time.perf_counter() - resampled
        return [next(fresh) if tree is None else tree for tree in trees]


def fit(budget: Budget, seq: Sequence, room: int) -> Budget:
    """`budget` cut to the tokens that `seq` may still commit and to the rows that its slot still has."""
    depth, nodes = seq.remaining - 1, room - 1
    if depth >= budget.depth and nodes >= budget.nodes:
        return budget
    if depth < 1 or nodes < 1:
        return NO_SPECULATION
    return Budget(min(nodes, budget.nodes), min(depth, budget.depth), budget.width)
