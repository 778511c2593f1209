"""Loops over the fake engine, requests for them, and a drafter that is mostly wrong."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.offers import Speculation
from redraft.runtime.trees.tree import make_tree
from redraft.types import NO_SPECULATION, Budget, DraftTree
from tests.runtime.fakes import FakeEngine, fake_verifier


def request(prompt: list[int], tokens: int = 20, **values: object) -> Request:
    return Request(list(prompt), len(prompt), len(prompt) + tokens, frozenset(), Greedy(), **values)


def loop_of(most: int = 2, spare: int = 2, engine: FakeEngine | None = None, rows: int = 400) -> DecodeLoop:
    verifier = fake_verifier(engine or FakeEngine(), rows, most, slots=most + spare)
    return DecodeLoop(verifier, Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION)))


def letters(count: int, seed: int = 0) -> list[int]:
    return [97 + (7 * number + seed) % 5 for number in range(count)]


class Wide(TreeMaker):
    """Drafts as many tokens as the budget allows. The lookup is unlikely to find any of them."""

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self.guess(seq, budget) for seq, budget in zip(batch, budgets, strict=True)]

    def guess(self, seq: Request, budget: Budget) -> DraftTree:
        nodes = budget.nodes
        return make_tree([seq.tokens[-1], *range(nodes)], [-1, *[0] * nodes], [1.0] + [0.5] * nodes)
