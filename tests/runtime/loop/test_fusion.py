"""Verification fusion: resampled trees and fresh drafts of a batch, or of one request, in one verification.

Whatever shares a call, texts and log probabilities are those of plain decoding, to the bit.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.verification_fusion import WAYS, Comparison, table
from redraft.engines import open_bundle
from redraft.noise_spec import DRAWN
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.observe.trace import replay
from redraft.runtime.requests.batch import Batch, CallLimits, RequestStep
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise
from redraft.runtime.trees.offers import Offer, OfferKey, Plan, Speculation
from redraft.runtime.trees.tree import make_tree, root_only
from redraft.types import Budget, DraftTree, OfferKind, Tree
from tests.runtime.devices import cpu_device, open_over
from tests.runtime.drafts import DRAFTER, LIMITS, MAKER, planned_batch, sequence
from tests.runtime.fakes import FakeEngine, fake_verifier
from tests.runtime.loop.loops import Wide, loop_of, request
from tests.runtime.lyanna_bundle import PROMPTS, STEPS, lyanna_of

Open = Callable[..., Runtime]
BUDGET = Budget(nodes=12, depth=STEPS, width=4)
WIDE = Budget(nodes=64, depth=STEPS, width=64)


@pytest.fixture
def opened(lyanna_bundle: Path, unmeasured: None) -> Open:
    """Return a function that opens the bundle with an option `resample`."""

    def open_runtime(max_num_seqs: int = 1, resample: bool | str = "union") -> Runtime:
        options = {"lyanna": {"resample": resample}}
        return Runtime.open(lyanna_bundle, threads=1, max_num_seqs=max_num_seqs, verify=False, drafter_options=options)

    return open_runtime


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, BUDGET), (3, BUDGET), (3, Budget(5, 2, 2))], ids=str)
def test_texts_and_log_probabilities_of_unions_are_those_of_plain_decoding(
    opened: Open, max_num_seqs: int, budget: Budget
) -> None:
    """Greedy and sampled requests share the batches."""
    params = [SamplingParams(max_tokens=30, temperature=0.8 * (n % 2), seed=n, logprobs=2) for n in range(len(PROMPTS))]
    trace = io.StringIO()
    with opened() as runtime:
        expected = runtime.generate(PROMPTS, params, "none")
    with opened(max_num_seqs) as runtime:
        found = runtime.generate(PROMPTS, params, SpeculationParams("lyanna", budget=budget), trace=trace)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    played = replay(trace.getvalue().splitlines())
    assert played.steps[OfferKind.UNION] > 10
    assert played.accepted[OfferKind.UNION] > 0
    assert set(played.steps) <= {OfferKind.FRESH, OfferKind.UNION, OfferKind.NONE}
    assert sum(one.metrics.num_draft_tokens for one in found) == played.nodes.total()


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_draws_are_not_merged(opened: Open, acceptance: str) -> None:
    """Both trees' draws would come from the same random numbers. The request resamples in place of a draft."""
    trace, params = io.StringIO(), SamplingParams(max_tokens=30, temperature=0.8, seed=1, acceptance=acceptance)
    with opened() as runtime:
        runtime.generate(PROMPTS[:4], params, SpeculationParams("lyanna", budget=BUDGET), trace=trace)
    played = replay(trace.getvalue().splitlines())
    merged, instead = (OfferKind.UNION, OfferKind.RESAMPLE)[:: 1 if acceptance == "coupled" else -1]
    assert played.steps[merged] > 0
    assert played.steps[instead] == 0


def test_a_device_merges_no_trees(lyanna_bundle: Path, unwarmed: None, plain: list[list[int]]) -> None:
    """It keeps one tree a slot, which the second draft would overwrite."""
    trace, bundle = io.StringIO(), open_bundle(lyanna_bundle, verify=False)
    with open_over(cpu_device(bundle), lyanna_bundle, 3, resample="union") as runtime:
        found = runtime.generate(PROMPTS, SamplingParams(max_tokens=40), SpeculationParams("lyanna", budget=WIDE),
                                 trace=trace)  # fmt: skip
        joins = lyanna_of(runtime).joins(sequence())
    assert [list(one.token_ids) for one in found] == plain[: len(PROMPTS)]
    played = replay(trace.getvalue().splitlines())
    assert played.steps[OfferKind.RESAMPLE] > 0
    assert played.steps[OfferKind.UNION] == 0
    assert not joins


@pytest.mark.parametrize(
    ("noise", "joins"), [(NO_NOISE, True), (DraftNoise(1.0), True), (DraftNoise(1.0, 0, DRAWN), False)]
)
def test_only_trees_that_were_not_drawn_join(opened: Open, noise: DraftNoise, joins: bool) -> None:
    seq = sequence()
    seq.noise = noise
    with opened() as runtime:
        assert lyanna_of(runtime).joins(seq) is joins


# --- trees ------------------------------------------------------------------------------------------------------------


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """Return the log probability of each node by its tokens from the root on."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, tree.log_probs.tolist(), strict=True))


def test_a_union_is_the_resampled_tree_and_the_fresh_draft(opened: Open) -> None:
    """In a large budget no node is cut, and nodes of both trees are one, with the larger probability."""
    trees: dict[str, Tree] = {}
    unions = shared = 0

    def noted(name: str) -> Callable[..., list[Tree]]:
        make = getattr(drafter, name)

        def made(batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
            (trees[name],) = found = make(batch, budgets)
            return found

        return made

    def record(seq: Request, plan: Plan, tree: Tree, result: object) -> None:
        nonlocal unions, shared
        if plan.kind is OfferKind.UNION:
            again, fresh, merged = paths(trees["resample"]), paths(trees["draft"]), paths(tree)
            assert merged == {path: max(again.get(path, -99.0), fresh.get(path, -99.0)) for path in again | fresh}
            unions, shared = unions + 1, shared + len(again) + len(fresh) - len(merged) - 1

    with opened() as runtime:
        drafter, how = lyanna_of(runtime), SpeculationParams("lyanna", budget=WIDE)
        (one,) = runtime.requests([[5, 6, 7]], [(SamplingParams(max_tokens=25), how)])
        for name in ("resample", "draft"):
            setattr(drafter, name, noted(name))
        one.record = record
        DecodeLoop(runtime.verifier, one.speculation).run([one])
    assert unions > 2
    assert shared > 0


FRESH, AGAIN = (Offer(OfferKey(DRAFTER, kind, steps), maker=MAKER, joins=steps > 0)
                for kind, steps in ((OfferKind.FRESH, 0), (OfferKind.RESAMPLE, 2)))  # fmt: skip


def tree(tokens: Sequence[int], parents: Sequence[int], probs: Sequence[float]) -> DraftTree:
    return make_tree([0, *tokens], [-1, *parents], [1.0, *probs])


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [
        (6, [0, 1, 2, 3, 4, 5]),
        (4, [0, 1, 2, 4, 5]),
        (3, [0, 1, 2, 4]),
    ],
)
def test_both_trees_are_within_the_budget_and_nodes_of_both_count_once(nodes: int, tokens: list[int]) -> None:
    """At most half of the budget's nodes are of the resampled tree, as without a fresh draft."""
    again = tree([1, 2, 3, 6], [0, 0, 2, 0], [0.5, 0.4, 0.2, 0.1])
    fresh = tree([1, 4, 5], [0, 0, 2], [0.6, 0.3, 0.05])
    controller = FixedBudget(Budget(nodes, 9, 9))
    seq = sequence()
    step = RequestStep(seq, Plan(LIMITS, root_only(0), (AGAIN, FRESH)), [(AGAIN, again), (FRESH, fresh)])
    controller.cut(Batch([step], CallLimits(1000)))
    assert sorted(step.tree.tokens.tolist()) == tokens
    assert paths(step.tree)[0, 1] == paths(fresh)[0, 1]


def test_a_fixed_budget_takes_both_offers_only_if_they_may_be_joined() -> None:
    for again, made in ((AGAIN, [AGAIN, FRESH]), (replace(AGAIN, joins=False), None)):
        batch = planned_batch(FixedBudget(BUDGET), [sequence()], [(again, FRESH)])
        assert [*batch.steps[0].plan.make] == (made or [again])
    assert batch.steps[0].plan.kind is OfferKind.RESAMPLE


# --- faults -----------------------------------------------------------------------------------------------------------


class Breaks(Wide):
    """Cannot resample. A draft for a request without its state fails."""

    def begin(self, seq: Request) -> None:
        seq.drafting[self] = True

    def remaining(self, seq: Request) -> int:
        return seq.prompt_length % 2

    def joins(self, seq: Request) -> bool:
        return True

    def resample(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        raise RuntimeError("no chain")

    def guess(self, seq: Request, budget: Budget) -> DraftTree:
        assert not budget.nodes or seq.drafting[self]
        return super().guess(seq, budget)


@pytest.mark.faulty_drafts
def test_a_failed_resampling_ends_the_drafts_of_its_own_requests_alone() -> None:
    verifier = fake_verifier(FakeEngine(), 400, max_num_seqs=2)
    loop = DecodeLoop(verifier, Speculation(Breaks(verifier), FixedBudget(Budget(3, 3, 3))))
    both, fresh = request([97] * 3), request([97] * 4)
    loop.plain = loop_of().plain
    for one in (both, fresh):
        one.speculation = Speculation(Breaks(verifier), FixedBudget(Budget(3, 3, 3)))
    fresh.speculation = both.speculation
    loop.run([both, fresh])
    assert "no chain" in str(both.drafting_error)
    assert fresh.drafting_error is None
    assert fresh.counters.drafted > 0


# --- Figure 12 --------------------------------------------------------------------------------------------------------


def test_four_ways_to_use_resampled_trees_have_the_same_texts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of their own calls take more verifications than exchanged ones, and a union takes fewest."""
    with opened(2) as runtime:
        how, params = SpeculationParams("lyanna", budget=BUDGET), SamplingParams(max_tokens=16)
        runtime.verifier.steps.takes_chunks = False  # calls with chunks have no trees to compare
        compared = Comparison(runtime, PROMPTS[:6], params, how, 2)
        monkeypatch.setattr(time, "perf_counter", iter(range(10**9)).__next__)
        found, plain = compared.measure(), compared.plain_texts()
    for totals in found.values():
        assert [text for _, text in totals.texts] == [plain[place] for place, _ in totals.texts]
        assert sum(len(text) for _, text in totals.texts) == sum(one.tokens for one in totals.timings)
    calls = {way: totals.calls for way, totals in found.items()}
    assert calls["separate"] > calls["exchange"] > calls["none"] >= calls["union"]
    assert found["separate"].steps == found["exchange"].steps, "the same trees, in other calls"
    rows = table(found, plain)
    assert [row[0] for row in rows[1:]] == [*WAYS]
    assert {row[-1] for row in rows[1:]} == {"yes"}
    assert table(found, [[0]] * len(plain))[1][-1].startswith("NO")
