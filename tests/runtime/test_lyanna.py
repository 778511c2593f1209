"""Lyanna end to end over tiny real graphs: the text is the verifier's own, and the state equals a single draft's.

Time stands still and calls cost nothing, so that drafts do not depend on the machine's load.
"""

from __future__ import annotations

import io
import random
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from redraft import names
from redraft.engines.host_device import array_of
from redraft.errors import UsageError
from redraft.methods.lyanna_token_info import lookup
from redraft.noise_spec import DRAWN
from redraft.runtime import Runtime, SamplingParams, SpeculationParams, scheduler
from redraft.runtime.controller import FixedBudget
from redraft.runtime.cycle import Cycle
from redraft.runtime.drafters.base import Pair
from redraft.runtime.drafters.hidden_states import CATCH_UP
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.offers import Offer, Plan, Speculation, StepLimits
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise, RowKey, noise_of
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.sequence import Sequence
from redraft.runtime.trace import replay
from redraft.runtime.tree import prune
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind
from tests.export.drafters.token_tree import Tree, build_subtree, resample

from .fakes import fix_costs
from .lyanna_bundle import CONTEXT, SCALE, STEPS, VOCABULARY, WIDTH

Open = Callable[..., Runtime]
FULL = Budget(nodes=30, depth=STEPS, width=9)
PARAMS = SamplingParams(max_tokens=40)


def prompts(count: int, seed: int, longest: int = 80) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture
def opened(lyanna_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the bundle without measuring."""
    fix_costs(monkeypatch)

    def open_runtime(max_num_seqs: int = 1, **lyanna: object) -> Runtime:
        options = {"lyanna": lyanna} if lyanna else {}
        return Runtime.open(lyanna_bundle, threads=1, max_num_seqs=max_num_seqs, verify=False, drafter_options=options)

    return open_runtime


PROMPTS = [*prompts(6, seed=1), [5] * 80, [3, 4] * 35]


@pytest.fixture(scope="module")
def plain(lyanna_bundle: Path) -> list[list[int]]:
    """Return the verifier's own tokens after PROMPTS. Some end early, at an end-of-sequence token or a full context."""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
            texts = [list(g.token_ids) for g in runtime.generate(PROMPTS, PARAMS, "none")]
    assert len({len(text) for text in texts}) > 2
    return texts


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (None, {}),
        (None, {"resample": False}),
        (None, {"method": "lyanna"}),
        (None, {"threshold": 1}),
        (FULL, {}),
        (FULL, {"resample": False}),
        (FULL, {"threshold": 1}),
        (Budget(5, 2, 2), {}),
        (Budget(1, 1, 1), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_drafted_text_is_the_verifiers_own(
    opened: Open, plain: list[list[int]], max_num_seqs: int, budget: Budget | None, options: dict[str, object]
) -> None:
    """Sequences begin, end and change slots. The trace replays, and contains only allowed drafts."""
    trace = io.StringIO()
    options = dict(options)
    method = options.pop("method", None)
    with opened(max_num_seqs, **options) as runtime:
        assert runtime.default_method == "ngram+lyanna"
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams(method, budget=budget), trace=trace)
    assert [list(generation.token_ids) for generation in found] == plain
    played = replay(trace.getvalue().splitlines())
    for prompt, text, traced in zip(PROMPTS, plain, sorted_by_prompt(played.requests), strict=True):
        assert traced[: len(prompt) + len(text)] == prompt + text
    assert played.steps[OfferKind.FRESH] > 0
    resamples = options.get("resample", True)
    if budget is not None or not resamples:  # without a budget, costs measured on this machine decide
        assert (played.steps[OfferKind.RESAMPLE] > 0) == resamples
    if budget is None or budget == FULL:
        assert played.accepted[OfferKind.FRESH] > 0
    if budget == FULL:  # otherwise the lookup may have had all accepted tokens
        assert (played.accepted[OfferKind.RESAMPLE] > 0) == options.get("resample", True)


def sorted_by_prompt(requests: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield the requests of a trace in the order of PROMPTS. A batch numbers them in the order of their first steps."""
    traced = list(requests.values())
    for prompt in PROMPTS:
        yield next(tokens for tokens in traced if tokens[: len(prompt)] == prompt)


@pytest.mark.parametrize("threshold", range(STEPS + 1))
def test_with_a_threshold_more_than_so_many_steps_must_remain(opened: Open, threshold: int) -> None:
    """After a fresh draft, steps are used one by one. Resampling ends when at most `threshold` remain."""
    with opened(threshold=threshold) as runtime:
        drafter = lyanna_of(runtime)
        seen: set[int] = set()
        drafted = drafter.resample

        def observed(batch: list[Sequence], budgets: list[Budget]) -> list[DraftTree]:
            seen.update(STEPS - seq.drafting[drafter].used for seq in batch)
            return drafted(batch, budgets)

        drafter.resample = observed  # type: ignore[method-assign]
        runtime.generate(PROMPTS[:3], PARAMS, speculation=SpeculationParams(budget=FULL))
    assert seen == set(range(threshold + 1, STEPS))


def lyanna_of(runtime: Runtime) -> LyannaDrafter:
    drafter = runtime._speculation.drafter("lyanna")
    assert isinstance(drafter, LyannaDrafter)
    return drafter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1}, "threshold must be a number of steps from 0, not -1"),
        ({"threshold": True}, "threshold must be a number of steps from 0, not True"),
        ({"resample": 1}, "must be true or false"),
        ({"depth": 3}, "unknown key depth"),
    ],
)
def test_bad_options_of_the_drafter_are_refused(opened: Open, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message), opened(**options):
        pass


# --- pending rows while other methods draft ---------------------------------------------------------------------------


class Scripted(FixedBudget):
    """Speculates in each step as in a script, per request. If it cannot resample, it drafts."""

    def __init__(self, scripts: dict[int, list[OfferKind]]) -> None:
        super().__init__(FULL)
        self._scripts = scripts
        self.played: list[OfferKind] = []

    def budget(self, seq: Sequence) -> Budget:
        """Return the budget of the script's next step."""
        wanted = self._scripts[id(seq)]
        self.now = wanted.pop(0) if wanted else OfferKind.NONE
        seq.control = self.now
        return NO_SPECULATION if self.now is OfferKind.NONE else FULL

    def _plan(self, seq: Sequence, offers: abc.Sequence[Offer], limits: StepLimits) -> Plan:
        if seq.control is OfferKind.NONE:
            return super()._plan(seq, offers, limits)
        wanted = [OfferKind.RESAMPLE, OfferKind.FRESH] if seq.control is OfferKind.RESAMPLE else [seq.control]
        chosen = next(([offer] for kind in wanted for offer in offers if offer.key.kind is kind), [])
        plan = super()._plan(seq, chosen, limits)
        if plan.speculates:
            self.played.append(plan.kind)
        return plan


def request(prompt: list[int], noise: DraftNoise = NO_NOISE) -> Sequence:
    return Sequence(list(prompt), len(prompt), CONTEXT, frozenset(), Greedy(), noise=noise)


def admitted(
    runtime: Runtime, requests: list[Sequence], scripts: dict[int, list[OfferKind]] | None = None
) -> tuple[Cycle, list[Sequence]]:
    """Return a cycle and the batch of these requests after their prompts. Without scripts, all steps are plain."""
    controller = Scripted(scripts or {id(seq): [] for seq in requests})
    cycle, batch = Cycle(runtime.verifier, Speculation(lyanna_of(runtime), controller)), list[Sequence]()
    for seq in requests:
        scheduler.admit(cycle, batch, seq)
    return cycle, batch


def state(drafter: LyannaDrafter, name: str) -> np.ndarray:
    """Return the drafter's state of every slot."""
    return array_of(drafter._state[name])


def chains(drafter: LyannaDrafter) -> np.ndarray:
    """Return the logits of the steps of the latest draft of every slot."""
    return state(drafter, names.CHAIN_LOGITS)


def check_state(runtime: Runtime, reference: Runtime, batch: list[Sequence]) -> None:
    """A draft now, after any history, must equal that of a drafter that computed the text at once."""
    drafter, other = lyanna_of(runtime), lyanna_of(reference)
    trees = drafter.draft(batch, [FULL] * len(batch))
    for slot, seq in enumerate(batch):
        fresh = Sequence(seq.tokens[:-1], len(seq.tokens) - 1, CONTEXT, frozenset(), Greedy())
        other.begin(fresh)
        for start, tokens in reference.verifier.prefill(fresh, 0):
            other.prefilled(fresh, 0, start, tokens)
        fresh.tokens.append(seq.tokens[-1])
        (expected,) = other.draft([fresh], [FULL])
        rows = fresh.drafting[other].cache_len
        assert (seq.drafting[drafter].cache_len, seq.drafting[drafter].pending) == (rows, 0) == (len(seq.tokens) - 1, 0)
        for name in (names.key_cache(0), names.value_cache(0)):
            kept, expected_rows = state(drafter, name)[slot, :, :rows], state(other, name)[0, :, :rows]
            np.testing.assert_allclose(kept, expected_rows, atol=2e-4)
        np.testing.assert_allclose(chains(drafter)[slot], chains(other)[0], atol=2e-4)
        assert trees[slot].tokens.tolist() == expected.tokens.tolist()
        assert trees[slot].parents.tolist() == expected.parents.tolist()
        seq.drafting[drafter].used = STEPS


@contextmanager
def pair(opened: Open, max_num_seqs: int) -> Iterator[tuple[Runtime, Runtime]]:
    with opened(max_num_seqs) as runtime, opened() as reference:
        yield runtime, reference


@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_does_not_depend_on_earlier_drafts(opened: Open, max_num_seqs: int, seed: int) -> None:
    """Steps without drafts, with lookups, resampled and fresh drafts are in any order, and differ between requests."""
    rng = random.Random(seed)
    kinds = [OfferKind.NONE, OfferKind.LOOKUP, OfferKind.RESAMPLE, OfferKind.RESAMPLE, OfferKind.FRESH]
    with pair(opened, max_num_seqs) as (runtime, reference):
        requests = [request(prompt) for prompt in prompts(5, seed=seed, longest=50)]
        scripts = {id(seq): [rng.choice(kinds) for _ in range(CONTEXT)] for seq in requests}
        controller = Scripted(scripts)
        drafter = Pair(runtime._speculation.drafter("ngram"), lyanna_of(runtime))
        cycle, steps = Cycle(runtime.verifier, Speculation(drafter, controller)), 0
        batch: list[Sequence] = []
        pending = list(requests)
        while pending or batch:
            while pending and len(batch) < max_num_seqs:
                scheduler.admit(cycle, batch, pending.pop(0))
            cycle.step(batch)
            steps += 1
            scheduler.retire(cycle, batch)
            if batch and steps % 5 == 0:
                check_state(runtime, reference, batch)
                for seq in batch:  # their drafts are not verified: no steps remain, and no row is pending
                    scripts[id(seq)].insert(0, OfferKind.NONE)
        assert set(controller.played) == set(kinds) - {OfferKind.NONE}


def test_many_pending_rows_are_computed_in_chunks(opened: Open) -> None:
    """More rows are pending than one call takes. Another sequence has none, and can still resample."""
    with pair(opened, 2) as (runtime, reference):
        drafter = lyanna_of(runtime)
        first, second = request([5, 6]), request([7, 8, 9])
        scripts = {id(first): [], id(second): [OfferKind.NONE] * 70 + [OfferKind.FRESH]}
        cycle, batch = admitted(runtime, [first, second], scripts)
        for _ in range(70):
            cycle.step(batch)
        assert first.drafting[drafter].pending > CATCH_UP
        cycle.step(batch)
        slot = batch.index(second)
        assert second.drafting[drafter].used < STEPS
        kept = chains(drafter)[slot].copy()
        drafter.draft(batch, [FULL if seq is first else NO_SPECULATION for seq in batch])
        assert np.array_equal(chains(drafter)[slot], kept)
        cycle.step(batch)
        check_state(runtime, reference, batch)


def test_a_second_draft_of_the_same_text_is_refused(opened: Open) -> None:
    """Without a first row, the graph would draft from old inputs."""
    with opened() as runtime:
        drafter, seq = lyanna_of(runtime), request([5, 6, 7])
        admitted(runtime, [seq])
        drafter.draft([seq], [FULL])
        with pytest.raises(ValueError, match="nothing was committed since the last draft"):
            drafter.draft([seq], [FULL])


def test_resampled_trees_are_algorithm_2s_and_follow_a_sequence_to_another_slot(opened: Open) -> None:
    """The logits are those of unused steps of the last draft, after the bonus. A moved sequence keeps them."""
    with opened(2) as runtime:
        drafter, requests = lyanna_of(runtime), [request([5, 6, 7]), request([8, 9, 3, 4])]
        cycle, batch = admitted(runtime, requests, {id(seq): [OfferKind.FRESH] for seq in requests})
        cycle.step(batch)
        assert all(drafter.remaining(seq) for seq in batch)
        tables = bundle_tables(runtime)
        trees = drafter.resample(batch, [FULL, FULL])
        for slot, seq in enumerate(batch):
            whole = resample(
                chains(drafter)[slot], seq.drafting[drafter].used, seq.tokens[-1],
                lambda token: lookup(tables, token), WIDTH, 0, SCALE, tables.get(names.DRAFT_VOCABULARY),
            )  # fmt: skip
            expected = whole.top_nodes(drafter.shape.resample_nodes)
            assert trees[slot].tokens.tolist() == expected.tokens
            assert trees[slot].parents.tolist() == expected.parents
            np.testing.assert_allclose(trees[slot].log_probs, expected.log_probs, atol=1e-4)
        cycle.move(batch[1], 1, 0)
        (moved,) = drafter.resample([batch[1]], [FULL])
        assert moved.tokens.tolist() == trees[1].tokens.tolist()
        assert moved.parents.tolist() == trees[1].parents.tolist()


def noisy_tree(runtime: Runtime, seq: Sequence, slot: int, nodes: int) -> Tree:
    """Return the tree of the unused steps of a sequence's last draft, with the noise of the positions after its last
    token."""
    drafter, tables, noise = lyanna_of(runtime), bundle_tables(runtime), seq.noise
    used = seq.drafting[drafter].used
    logits = chains(drafter)[slot].copy()
    vocabulary = tables.get(names.DRAFT_VOCABULARY)
    ids = np.arange(VOCABULARY) if vocabulary is None else vocabulary
    keys = noise.keys(len(seq.tokens), STEPS - used)
    rows = np.stack([noise_of(RowKey(*key), ids.astype(np.uint32)) for key in keys])
    logits[used:] += np.float32(noise.temperature) * rows
    scale = 1 / noise.temperature if noise.drawn else SCALE
    tree = build_subtree(logits[used:], seq.tokens[-1], partial(lookup, tables), WIDTH, scale, vocabulary, noise.drawn)
    return tree.top_nodes(nodes)


def assert_same_tree(found: DraftTree, expected: Tree) -> None:
    assert found.tokens.tolist() == expected.tokens
    assert found.parents.tolist() == expected.parents
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)


SAMPLED = [DraftNoise(1.0, 3), DraftNoise(0.5, 4), DraftNoise(0.6, 5, DRAWN)]
"""Draws are scaled by 1 / 0.6, which is not the drafter's own factor."""


def test_drafts_and_resampled_trees_have_the_noise_of_absolute_positions(opened: Open) -> None:
    """A step later, the unused steps have the same positions as before, now nearer to the root."""
    with opened(3) as runtime:
        drafter = lyanna_of(runtime)
        texts = [5, 6, 7], [8, 9, 3, 4], [2, 3]
        requests = [request(text, noise) for text, noise in zip(texts, SAMPLED, strict=True)]
        cycle, batch = admitted(runtime, requests)
        for slot, tree in enumerate(drafter.draft(batch, [FULL] * 3)):
            assert_same_tree(tree, noisy_tree(runtime, batch[slot], slot, drafter.shape.nodes))
        for used in (1, 2):
            cycle.step(batch)
            for slot, tree in enumerate(drafter.resample(batch, [FULL] * 3)):
                assert batch[slot].drafting[drafter].used == used
                assert_same_tree(tree, noisy_tree(runtime, batch[slot], slot, drafter.shape.resample_nodes))


def test_drawn_trees_say_what_each_nodes_children_were_drawn_from(opened: Open) -> None:
    """Also a tree that was cut, and one of a sequence next to others that draw nothing."""
    with opened(2) as runtime:
        drafter, tables = lyanna_of(runtime), bundle_tables(runtime)
        requests = [request([5, 6, 7], SAMPLED[0]), request([2, 3], SAMPLED[2])]
        cycle, batch = admitted(runtime, requests)
        drafter.draft(batch, [FULL] * 2)
        cycle.step(batch)
        coupled, drawn = drafter.resample(batch, [FULL] * 2)
        slot = batch.index(requests[1])
        if slot == 0:
            coupled, drawn = drawn, coupled
        assert coupled.draws is None
        for tree in (drawn, drawn.first(2), prune(drawn, 3)):
            assert tree.draws is not None
            assert tree.draws.proposal.tokens is tables.get(names.DRAFT_VOCABULARY) is None
            for depth, token in ((0, requests[1].tokens[-1]), (1, int(tree.tokens[1]))):
                expected = (chains(drafter)[slot][1 + depth] + lookup(tables, token)) / np.float32(0.6)
                np.testing.assert_allclose(tree.draws.proposal.logits(depth, token), expected, rtol=1e-6)


def bundle_tables(runtime: Runtime) -> dict[str, np.ndarray]:
    """Return the token tables by name."""
    bundle = runtime._bundle
    assert bundle is not None
    return bundle.tables("lyanna")


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_pending_rows_near_the_end_of_the_context_are_drafted_from(opened: Open, max_num_seqs: int) -> None:
    """Padding to a multiple of sixteen rows, past the last position of the context, must not change drafts."""
    with pair(opened, max_num_seqs) as (runtime, reference):
        drafter, late = lyanna_of(runtime), request([5, 6, 7, 8] * 18)
        others = [request([5, 6, 7])] if max_num_seqs > 1 else []
        cycle, batch = admitted(runtime, [*others, late])
        for pending in (2, 17):
            drafter.draft(batch, [FULL if seq is late else NO_SPECULATION for seq in batch])
            for _ in range(pending):
                cycle.step(batch)
            assert late.drafting[drafter].pending == pending
        assert len(late.tokens) == 72 + 1 + 19 < CONTEXT
        assert late.drafting[drafter].cache_len + 32 > CONTEXT + STEPS
        check_state(runtime, reference, batch)


def test_a_batch_with_one_sequence_near_the_end_drafts_for_the_others(opened: Open) -> None:
    """The most pending rows of a batch set the width of all, and the other sequences' rows are padded."""
    with pair(opened, 2) as (runtime, reference):
        late, early = request([5, 6, 7, 8] * 22), request([9, 3, 4] * 10)
        _, batch = admitted(runtime, [late, early])
        check_state(runtime, reference, batch)


@pytest.mark.parametrize("refused", ["generate", "stream"])
def test_a_second_generation_is_refused_before_anything_is_measured(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Measuring the costs of drafts overwrites KV rows, which would change the text of a running request."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prompt = [5, 6, 7, 8] * 23
    with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
        running = runtime.stream(prompt, PARAMS, "none")
        next(running)
        kv = runtime.verifier.steps.kv
        kv[:] = kept = np.random.default_rng(0).random(kv.shape, np.float32)
        with pytest.raises(UsageError, match="still running"):
            runtime.generate([[5]], PARAMS) if refused == "generate" else next(runtime.stream([5], PARAMS))
        assert np.array_equal(kv, kept)
        running.close()
        assert runtime.generate([[5]], PARAMS)
