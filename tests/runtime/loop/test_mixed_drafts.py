"""Batches with fresh drafts, resampled ones and plain steps, by one drafter and by two.

Each sequence gets the trees that it gets alone, on the host and on devices with step graphs. One verification takes
all trees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redraft.engines import Bundle, open_bundle
from redraft.engines.device import Device
from redraft.engines.host_device import HostDevice
from redraft.runtime import Runtime
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.device_tree import calls_of
from redraft.runtime.trees.offers import Plan, Speculation
from redraft.runtime.trees.tree import layout
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind, Outcome, Tree
from tests.runtime.devices import cpu_device, open_over, tensorrt_device
from tests.runtime.drafts import Scripted
from tests.runtime.lyanna_bundle import FULL, STEPS, admitted, lyanna_of, prompts, request

pytestmark = pytest.mark.usefixtures("unwarmed")
NINE = Budget(nodes=9, depth=STEPS, width=9)
"""It fits after every prompt here, so that no tree is cut because of another."""
TOKENS = 18


@dataclass
class Played:
    """Requests that were run to their end, and their trees. steps: the kinds and the trees of each step's batch."""

    requests: list[Request]
    trees: dict[int, list[tuple[list[int], list[int]]]]
    steps: list[tuple[list[OfferKind], list[Tree]]] = field(default_factory=list)


def play(runtime: Runtime, texts: list[list[int]], owners: list[str], seed: int, budget: Budget) -> Played:
    """Run requests of these drafters, whose scripts depend on the seed alone, at most one a slot at a time."""
    kinds = (OfferKind.NONE, OfferKind.FRESH, OfferKind.RESAMPLE, OfferKind.RESAMPLE)
    scripts: dict[int, list[OfferKind]] = {}
    controller, requests = Scripted(budget, scripts), []
    for number, (text, owner) in enumerate(zip(texts, owners, strict=True)):
        limit = min(len(text) + TOKENS, runtime.max_model_len)
        seq = Request(list(text), len(text), limit, frozenset(), Greedy())
        seq.speculation = Speculation(runtime._speculation.drafter(owner), controller)
        scripts[id(seq)] = random.Random(seed + number).choices(kinds, k=TOKENS)
        requests.append(seq)
    played = Played(requests, {id(seq): [] for seq in requests})
    verify = runtime.verifier.verify
    runtime.verifier.steps.takes_chunks = False  # calls with chunks have no drafts

    def verified(batch: list[Request], trees: list[Tree], *others: Any) -> list[Outcome]:
        played.steps.append(([], trees))
        return verify(batch, trees, *others)

    def record(seq: Request, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        played.steps[-1][0].append(plan.kind)
        arrays = tree.tokens.tolist(), tree.parents.tolist()
        if seq.remaining > STEPS:  # at the end, the host cuts trees that a device does not cut
            played.trees[id(seq)].append(arrays)

    runtime.verifier.verify = verified  # type: ignore[assignment, method-assign]
    for seq in requests:
        seq.record = record
    DecodeLoop(runtime.verifier, requests[0].speculation).run(requests)
    return played


def device_of(name: str, bundle: Bundle, folder: Path) -> Device:
    if name == "host":
        return HostDevice(bundle, 1, step_graphs=False)
    return cpu_device(bundle) if name == "cpu" else tensorrt_device(bundle, folder).device


def alone(path: Path, texts: list[list[int]], owners: list[str], seed: int, budget: Budget) -> Played:
    """Return the requests after running them one by one on the host."""
    with open_over(device_of("host", open_bundle(path, verify=False), path), path) as runtime:
        return play(runtime, texts, owners, seed, budget)


def check(found: Played, expected: Played) -> None:
    for ours, theirs in zip(found.requests, expected.requests, strict=True):
        assert ours.tokens == theirs.tokens
        assert found.trees[id(ours)] == expected.trees[id(theirs)]


@pytest.mark.parametrize(("device", "seed"), [("host", 0), ("cpu", 1), ("tensorrt", 0)])
def test_fresh_and_resampled_trees_of_a_batch_are_those_of_each_sequence_alone(
    lyanna_bundle: Path, tmp_path: Path, device: str, seed: int
) -> None:
    """Prompts are longer than one call of the drafter, and requests in three slots begin and end."""
    texts = [*prompts(5, seed=seed + 20, longest=40), [5, 6, 7] * 22]
    owners = ["lyanna"] * len(texts)
    bundle = open_bundle(lyanna_bundle, verify=False)
    with open_over(device_of(device, bundle, tmp_path), lyanna_bundle, 3) as runtime:
        found = play(runtime, texts, owners, seed, NINE)
    check(found, alone(lyanna_bundle, texts, owners, seed, NINE))
    mixed = sum({OfferKind.FRESH, OfferKind.RESAMPLE} <= set(kinds) for kinds, _ in found.steps)
    assert mixed > 5
    assert sum(len(calls_of(trees)) > 1 for _, trees in found.steps) == (0 if device == "host" else mixed)


@pytest.mark.parametrize("device", ["host", "cpu"])
def test_two_drafters_draft_side_by_side(several: Path, tmp_path: Path, device: str) -> None:
    """Each drafter has its own requests, whose slots the other's calls do not change."""
    texts = [[11, 4, 9, 7] * 5, [3, 12, 5], [7] * 66, [8, 10, 3, 4, 4], [2, 3]]
    owners = ["trained", "mtp", "mtp", "trained", "mtp"]
    bundle = open_bundle(several, verify=False)
    with open_over(device_of(device, bundle, tmp_path), several, 3) as runtime:
        found = play(runtime, texts, owners, 3, NINE)
        drafters = [runtime._speculation.drafter(owner) for owner in owners]
    check(found, alone(several, texts, owners, 3, NINE))
    beside = sum(
        len(calls_of(trees)) > 1 if device == "cpu" else kinds.count(OfferKind.NONE) < len(kinds) - 1
        for kinds, trees in found.steps
    )
    assert beside > 5
    for drafter in set(drafters):
        assert isinstance(drafter, HiddenStateDrafter)
        own = [one is drafter for one in drafters]
        assert sum(seq.counters.accepted for seq, mine in zip(found.requests, own, strict=True) if mine) > 0
        pending = [seq.drafting[drafter].pending if mine else 0 for seq, mine in zip(found.requests, own, strict=True)]
        assert drafter.pending(found.requests, 1, range(len(own))) == pending
        others = [seq for seq, mine in zip(found.requests, own, strict=True) if not mine]
        assert drafter.pending(others, 1, range(len(others))) is None


def test_a_slot_that_is_not_drafted_for_keeps_what_can_be_resampled(lyanna_bundle: Path) -> None:
    """Fresh drafts for one sequence do not change the other's chain, and an earlier tree stays in the store."""
    with open_over(cpu_device(open_bundle(lyanna_bundle, verify=False)), lyanna_bundle, 2) as runtime:
        requests = [request([5, 6, 7]), request([8, 9])]
        loop, seqs = admitted(runtime, requests, {id(seq): [OfferKind.FRESH] for seq in requests})
        loop.step()
        drafter = lyanna_of(runtime)
        assert drafter.remaining(requests[1])
        (_, kept) = drafter.resample(seqs, [NO_SPECULATION, FULL])
        expected = kept.tokens.tolist()
        trees = drafter.draft(seqs, [FULL, NO_SPECULATION])
        assert trees[1].tokens.tolist() == [requests[1].tokens[-1]]
        store = runtime.verifier.steps.store
        assert store is not None
        assert store.tokens.read()[1, : len(expected)].tolist() == expected
        assert store.tokens.read()[0, : len(trees[0])].tolist() == trees[0].tokens.tolist()
        (_, again) = drafter.resample(seqs, [NO_SPECULATION, FULL])
        assert again.tokens.tolist() == expected
        assert again.parents.tolist() == kept.parents.tolist()
        trees = drafter.resample(seqs, [NO_SPECULATION, FULL])
        with pytest.raises(ValueError, match="the tree of sequence 0 was drafted for slot 1"):
            runtime.verifier.verify(seqs, trees[::-1])


@pytest.mark.parametrize("device", ["cpu", "tensorrt"])
@pytest.mark.parametrize(
    ("budget", "stays", "max_num_seqs"),
    [
        (Budget(2, 2, 2), True, 2),
        (Budget(30, 2, 9), False, 1),
        (Budget(30, 9, 1), False, 2),
        (Budget(8, 3, 2), False, 2),
    ],
    ids=str,
)
def test_a_budgets_depth_and_width_hold_on_a_device(
    lyanna_bundle: Path, tmp_path: Path, device: str, budget: Budget, stays: bool, max_num_seqs: int
) -> None:
    """Fresh and resampled trees equal the host's. A tree stays on the device if only its nodes are limited."""
    texts = prompts(max_num_seqs, seed=4, longest=20)
    owners = ["lyanna"] * len(texts)
    bundle = open_bundle(lyanna_bundle, verify=False)
    with open_over(device_of(device, bundle, tmp_path), lyanna_bundle, max_num_seqs) as runtime:
        found = play(runtime, texts, owners, 5, budget)
    check(found, alone(lyanna_bundle, texts, owners, 5, budget))
    trees = [tree for _, batch in found.steps if len(batch) == max_num_seqs for tree in batch if len(tree) > 1]
    assert ((True, False) if stays else (False, True)) in {
        (tree.on_device, isinstance(tree, DraftTree)) for tree in trees
    }
    for tree in trees:
        levels = np.bincount(layout(tree.parents).depths)[1:]
        assert len(levels) <= budget.depth
        assert max(levels) <= budget.width
