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
        """A tree for each sequence: resampled where one is worth it, else freshly drafted, else its root alone."""
        trees = [root_only(seq.tokens[-1]) for seq in batch]
        room = self.verifier.capacity - max(seq.past_len for seq in batch)
        budgets = [fit(self.controller.budget(seq), seq, room) for seq in batch]
        drafting = [slot for slot, budget in enumerate(budgets) if budget.nodes]
        started = time.perf_counter()
        if drafting:
            left = []
            resampled = self.drafter.resample([batch[i] for i in drafting], [budgets[i] for i in drafting])
            between = time.perf_counter()
            for slot, tree in zip(drafting, resampled, strict=True):
                if tree is None:
                    left.append(slot)
                else:
                    trees[slot] = tree
            fresh = self.drafter.draft([batch[i] for i in left], [budgets[i] for i in left])
            for slot, tree in zip(left, fresh, strict=True):
                trees[slot] = tree
            for slot in drafting:
                trees[slot] = self.controller.choose(batch[slot], trees[slot])
            ended = time.perf_counter()
            self.clock.resample += between - started
            self.clock.draft += ended - between
            self.clock.proposal = ended - started
        return trees


def fit(budget: Budget, seq: Sequence, room: int) -> Budget:
    """`budget` cut to the tokens that `seq` may still commit and to the rows that its slot still has."""
    depth, nodes = seq.remaining - 1, room - 1
    if depth >= budget.depth and nodes >= budget.nodes:
        return budget
    if depth < 1 or nodes < 1:
        return NO_SPECULATION
    return Budget(min(nodes, budget.nodes), min(depth, budget.depth), budget.width)
