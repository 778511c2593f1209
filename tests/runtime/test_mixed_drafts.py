"""Batches with fresh drafts, resampled ones and plain steps, by one drafter and by two.

Each sequence gets the trees that it gets alone, on the host and on devices with step graphs. One verification takes
all trees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from redraft.config import DrafterBuild
from redraft.engines import Bundle, open_bundle
from redraft.engines.device import Device
from redraft.engines.host_device import HostDevice
from redraft.runtime import Runtime
from redraft.runtime.device_tree import calls_of
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.drafters.hidden_states import HiddenStateDrafter
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import Verifier
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind, Tree

from .devices import cpu_device, open_over, tensorrt_device
from .fakes import fix_costs
from .lyanna_bundle import STEPS, write_lyanna_bundle
from .test_lyanna import FULL, prompts

NINE = Budget(nodes=9, depth=STEPS, width=9)
"""It fits after every prompt here, so that no tree is cut because of another."""
Nodes = tuple[list[int], list[int]]


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_costs(monkeypatch)
    monkeypatch.setattr(Verifier, "warm", lambda self: None)


@dataclass
class Played:
    """A request with its `drafter`, a script of its steps, and the trees that it received."""

    seq: Sequence
    drafter: TreeMaker
    script: list[OfferKind]
    trees: list[Nodes] = field(default_factory=list)

    def wants(self) -> OfferKind:
        wanted = self.script[len(self.trees)]
        fresh = wanted is OfferKind.RESAMPLE and not self.drafter.remaining(self.seq)
        return OfferKind.FRESH if fresh else wanted


def play(verifier: Verifier, requests: list[Played], budget: Budget) -> Iterator[tuple[list[OfferKind], list[Tree]]]:
    """Run the requests, at most one a slot at a time. Yields each step's sources and trees."""
    waiting, batch = list(requests), []
    while waiting or batch:
        while waiting and len(batch) < verifier.max_num_seqs:
            played, slot = waiting.pop(0), len(batch)
            batch.append(played)
            played.drafter.begin(played.seq)
            for start, tokens in verifier.prefill(played.seq, slot):
                played.drafter.prefilled(played.seq, slot, start, tokens)
            played.seq.begin(verifier.first_outcome(played.seq, slot), verifier.clock)
        yield step(verifier, batch, budget)
        for slot in reversed(range(len(batch))):
            if batch[slot].seq.finish_reason is not None:
                last = batch.pop()
                if slot < len(batch):
                    verifier.move(len(batch), slot, last.seq.cache_len)
                    last.drafter.move(last.seq, len(batch), slot)
                    batch[slot] = last


def step(verifier: Verifier, batch: list[Played], budget: Budget) -> tuple[list[OfferKind], list[Tree]]:
    """Run one step: a call of every drafter and source, resampling first or last, then one verification."""
    seqs, sources = [played.seq for played in batch], [played.wants() for played in batch]
    trees: list[Tree] = [root_only(seq.tokens[-1]) for seq in seqs]
    room = min(verifier.max_model_len - max(seq.cache_len for seq in seqs), verifier.largest_tree) - 1
    size = Budget(min(budget.nodes, room), budget.depth, budget.width) if room > 0 else NO_SPECULATION
    order = (OfferKind.FRESH, OfferKind.RESAMPLE) if len(seqs[0].tokens) % 2 else (OfferKind.RESAMPLE, OfferKind.FRESH)
    for source in order:
        for drafter in dict.fromkeys(played.drafter for played in batch):
            wanted = [played.drafter is drafter and of is source for played, of in zip(batch, sources, strict=True)]
            if any(wanted) and size.nodes:
                make = drafter.draft if source is OfferKind.FRESH else drafter.resample
                made = make(seqs, [size if yes else NO_SPECULATION for yes in wanted])
                trees = [new if yes else old for new, old, yes in zip(made, trees, wanted, strict=True)]
    outcomes = verifier.verify(seqs, trees)
    for played, tree, outcome in zip(batch, trees, outcomes, strict=True):
        played.trees.append((tree.tokens.tolist(), tree.parents.tolist()))
        played.seq.commit(tree, outcome)
        played.drafter.accept(played.seq, tree, outcome)
    return sources, trees


def device_of(name: str, bundle: Bundle, folder: Path) -> Device:
    if name == "host":
        return HostDevice(bundle, 1, step_graphs=False)
    return cpu_device(bundle) if name == "cpu" else tensorrt_device(bundle, folder).device


def requests_of(runtime: Runtime, texts: list[list[int]], owners: list[str], seed: int, tokens: int) -> list[Played]:
    """Return requests whose scripts depend on the seed alone."""
    kinds = (OfferKind.NONE, OfferKind.FRESH, OfferKind.RESAMPLE, OfferKind.RESAMPLE)
    limit = runtime.max_model_len
    return [
        Played(
            Sequence(list(text), len(text), min(len(text) + tokens, limit), frozenset(), Greedy()),
            runtime._speculation.drafter(owner),
            random.Random(seed + number).choices(kinds, k=tokens),
        )
        for number, (text, owner) in enumerate(zip(texts, owners, strict=True))
    ]


def alone(
    path: Path, texts: list[list[int]], owners: list[str], seed: int, tokens: int, budget: Budget
) -> list[Played]:
    """Return the requests after running them one by one on the host."""
    bundle = open_bundle(path, verify=False)
    with open_over(device_of("host", bundle, path), path) as runtime:
        requests = requests_of(runtime, texts, owners, seed, tokens)
        for _ in play(runtime.verifier, requests, budget):
            pass
    return requests


def check(found: list[Played], expected: list[Played]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.seq.tokens == theirs.seq.tokens
        assert ours.trees == theirs.trees


@pytest.mark.parametrize("device", ["host", "cpu", "tensorrt"])
@pytest.mark.parametrize("seed", [0, 1])
def test_fresh_and_resampled_trees_of_a_batch_are_those_of_each_sequence_alone(
    lyanna_bundle: Path, tmp_path: Path, device: str, seed: int
) -> None:
    """Prompts are longer than one call of the drafter, and requests in three slots begin and end."""
    texts = [*prompts(5, seed=seed + 20, longest=40), [5, 6, 7] * 22]
    owners = ["lyanna"] * len(texts)
    expected = alone(lyanna_bundle, texts, owners, seed, 18, NINE)
    bundle = open_bundle(lyanna_bundle, verify=False)
    mixed = several = 0
    with open_over(device_of(device, bundle, tmp_path), lyanna_bundle, 3) as runtime:
        requests = requests_of(runtime, texts, owners, seed, 18)
        for sources, trees in play(runtime.verifier, requests, NINE):
            mixed += {OfferKind.FRESH, OfferKind.RESAMPLE} <= set(sources)
            several += len(calls_of(trees)) > 1
        check(requests, expected)
    assert mixed > 5
    assert several == (0 if device == "host" else mixed)


def test_a_slot_that_is_not_drafted_for_keeps_what_can_be_resampled(lyanna_bundle: Path) -> None:
    """Fresh drafts for one sequence do not change the other's chain, and an earlier tree stays in the store."""
    bundle = open_bundle(lyanna_bundle, verify=False)
    with open_over(cpu_device(bundle), lyanna_bundle, 2) as runtime:
        verifier, drafter = runtime.verifier, runtime._speculation.drafter("lyanna")
        first, second = requests_of(runtime, [[5, 6, 7], [8, 9]], ["lyanna"] * 2, 0, 20)
        first.script[:2], second.script[:2] = [OfferKind.FRESH] * 2, [OfferKind.FRESH, OfferKind.RESAMPLE]
        playing = play(verifier, [first, second], FULL)
        next(playing)
        seqs = [first.seq, second.seq]
        assert drafter.remaining(second.seq)
        (_, kept) = drafter.resample(seqs, [NO_SPECULATION, FULL])
        expected = kept.tokens.tolist()
        trees = drafter.draft(seqs, [FULL, NO_SPECULATION])
        assert trees[1].tokens.tolist() == [second.seq.tokens[-1]]
        store = verifier.steps.store
        assert store is not None
        assert store.tokens.read()[1, : len(expected)].tolist() == expected
        assert store.tokens.read()[0, : len(trees[0])].tolist() == trees[0].tokens.tolist()
        (_, again) = drafter.resample(seqs, [NO_SPECULATION, FULL])
        assert again.tokens.tolist() == expected
        assert again.parents.tolist() == kept.parents.tolist()


def test_a_tree_of_another_slot_is_refused(lyanna_bundle: Path) -> None:
    with open_over(cpu_device(open_bundle(lyanna_bundle, verify=False)), lyanna_bundle, 2) as runtime:
        requests = requests_of(runtime, [[5, 6, 7], [8, 9]], ["lyanna"] * 2, 0, 20)
        for one in requests:
            one.script[:2] = [OfferKind.FRESH] * 2
        next(play(runtime.verifier, requests, FULL))
        seqs = [one.seq for one in requests]
        trees = runtime._speculation.drafter("lyanna").resample(seqs, [FULL, FULL])
        with pytest.raises(ValueError, match="the tree of sequence 0 was drafted for slot 1"):
            runtime.verifier.verify(seqs, trees[::-1])


@pytest.fixture(scope="module")
def pair_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with two drafters."""
    other = DrafterBuild("mtp", "random", "mtp", {"precision": "fp32", "steps": 3})
    return write_lyanna_bundle(tmp_path_factory.mktemp("pair"), others=(other,))


@pytest.mark.parametrize("device", ["host", "cpu"])
def test_two_drafters_draft_side_by_side(pair_bundle: Path, tmp_path: Path, device: str) -> None:
    """Each drafter has its own requests, whose slots the other's calls do not change."""
    texts = [[11, 4, 9, 7] * 5, [3, 12, 5], [7] * 66, [8, 10, 3, 4, 4], [2, 3]]
    owners = ["lyanna", "mtp", "mtp", "lyanna", "mtp"]
    expected = alone(pair_bundle, texts, owners, 3, 18, NINE)
    bundle = open_bundle(pair_bundle, verify=False)
    beside = 0
    with open_over(device_of(device, bundle, tmp_path), pair_bundle, 3) as runtime:
        requests = requests_of(runtime, texts, owners, 3, 18)
        for sources, trees in play(runtime.verifier, requests, NINE):
            beside += len(calls_of(trees)) > 1 if device == "cpu" else sources.count(OfferKind.NONE) < len(sources) - 1
        check(requests, expected)
    assert beside > 5
    for drafter in ("lyanna", "mtp"):
        assert sum(one.seq.counters.accepted for one, of in zip(requests, owners, strict=True) if of == drafter) > 0
    for drafter in {one.drafter for one in requests}:
        assert isinstance(drafter, HiddenStateDrafter)
        own = [one.drafter is drafter for one in requests]
        seqs = [one.seq for one in requests]
        pending = drafter.pending(seqs, 1, range(len(seqs)))
        assert pending == [seq.drafting[drafter].pending if mine else 0 for seq, mine in zip(seqs, own, strict=True)]
        others = [seq for seq, mine in zip(seqs, own, strict=True) if not mine]
        assert drafter.pending(others, 1, range(len(others))) is None


def deepest(tree: Tree) -> tuple[int, int]:
    """Return the depth of a tree, and the nodes of its widest level."""
    depths = [0]
    for parent in tree.parents.tolist()[1:]:
        depths.append(depths[parent] + 1)
    return max(depths), max([depths.count(depth) for depth in range(1, max(depths) + 1)], default=0)


@pytest.mark.parametrize("device", ["cpu", "tensorrt"])
@pytest.mark.parametrize(
    ("budget", "stays"),
    [
        (FULL, True), (Budget(5, 9, 9), True), (Budget(2, 2, 2), True), (Budget(30, 2, 9), False),
        (Budget(30, 9, 1), False), (Budget(8, 3, 2), False), (Budget(5, 2, 2), False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_budgets_depth_and_width_hold_on_a_device(
    lyanna_bundle: Path, tmp_path: Path, device: str, budget: Budget, stays: bool, max_num_seqs: int
) -> None:
    """Fresh and resampled trees equal the host's. A tree stays on the device if only its nodes are limited."""
    bundle = open_bundle(lyanna_bundle, verify=False)
    texts = prompts(max_num_seqs, seed=4, longest=20)
    expected = alone(lyanna_bundle, texts, ["lyanna"] * len(texts), 5, 20, budget)
    with open_over(device_of(device, bundle, tmp_path), lyanna_bundle, max_num_seqs) as runtime:
        requests = requests_of(runtime, texts, ["lyanna"] * len(texts), 5, 20)
        seen = set()
        for _, trees in play(runtime.verifier, requests, budget):
            for tree in trees:
                depth, width = deepest(tree)
                assert depth <= budget.depth
                assert width <= budget.width
                if len(tree) > 1 and len(trees) == max_num_seqs:
                    seen.add((tree.on_device, isinstance(tree, DraftTree)))
        check(requests, expected)
    assert (True, False) in seen if stays else (False, True) in seen
