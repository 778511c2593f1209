"""Lyanna end to end over tiny real graphs: the text is the verifier's own, and the state equals a single draft's.

Time stands still and calls cost nothing, so that drafts do not depend on the machine's load.
"""

from __future__ import annotations

import io
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from redraft import names
from redraft.engines.host_device import HostDevice, array_of
from redraft.errors import UsageError
from redraft.methods.lyanna_token_info import lookup
from redraft.noise_spec import DRAWN
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.drafters import engine
from redraft.runtime.drafters.base import Pair
from redraft.runtime.drafters.hidden_states import CATCH_UP
from redraft.runtime.drafters.lyanna import LyannaDrafter
from redraft.runtime.generation import Origin
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.observe.trace import replay
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise, RowKey, noise_of
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION, Budget, DraftTree, OfferKind
from tests.export.drafters.tiny import HIDDEN
from tests.export.drafters.token_tree import Tree, build_subtree
from tests.runtime.drafts import Scripted
from tests.runtime.lyanna_bundle import (
    ALL,
    CONTEXT,
    FULL,
    PARAMS,
    PROMPTS,
    SCALE,
    STEPS,
    VOCABULARY,
    WIDTH,
    admit,
    admitted,
    fill,
    lyanna_of,
    prompts,
    request,
)

Open = Callable[..., Runtime]


@pytest.fixture
def opened(lyanna_bundle: Path, unmeasured: None) -> Open:
    """Return a function that opens the bundle without measuring."""

    def open_runtime(max_num_seqs: int = 1, **lyanna: object) -> Runtime:
        options = {"lyanna": lyanna} if lyanna else {}
        return Runtime.open(lyanna_bundle, threads=1, max_num_seqs=max_num_seqs, verify=False, drafter_options=options)

    return open_runtime


@pytest.mark.parametrize(
    ("max_num_seqs", "method", "budget", "options"),
    [
        (1, None, None, {}),
        (3, None, None, {"resample": False}),
        (3, "lyanna", None, {}),
        (3, None, None, {"threshold": 1}),
        (1, None, FULL, {"threshold": 1}),
        (3, None, FULL, {}),
        (3, None, FULL, {"resample": False}),
        (1, None, Budget(5, 2, 2), {}),
        (3, None, Budget(1, 1, 1), {}),
    ],
    ids=str,
)
def test_drafted_text_is_the_verifiers_own(
    opened: Open, plain: list[list[int]], max_num_seqs: int, method: str | None, budget: Budget | None,
    options: dict[str, object],
) -> None:  # fmt: skip
    """Sequences begin, end and change slots. The trace replays, and contains only allowed drafts."""
    trace, texts = io.StringIO(), plain[: len(PROMPTS)]
    with opened(max_num_seqs, **options) as runtime:
        assert runtime.default_method == "ngram+lyanna"
        found = runtime.generate(PROMPTS, PARAMS, SpeculationParams(method, budget=budget), trace=trace)
    assert [list(generation.token_ids) for generation in found] == texts
    played = replay(trace.getvalue().splitlines())
    for prompt, text, traced in zip(PROMPTS, texts, sorted_by_prompt(played.requests), strict=True):
        assert traced[: len(prompt) + len(text)] == prompt + text
    assert played.steps[OfferKind.FRESH] > 0
    resamples = options.get("resample", True)
    if budget is not None or not resamples:  # without a budget, costs measured on this machine decide
        assert (played.steps[OfferKind.RESAMPLE] > 0) == resamples
    if budget in (None, FULL):
        assert played.accepted[OfferKind.FRESH] > 0
    if budget == FULL:  # otherwise the lookup may have had all accepted tokens
        assert (played.accepted[OfferKind.RESAMPLE] > 0) == resamples


def sorted_by_prompt(requests: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield the requests of a trace in the order of PROMPTS. A batch numbers them in the order of their first steps."""
    traced = list(requests.values())
    for prompt in PROMPTS:
        yield next(tokens for tokens in traced if tokens[: len(prompt)] == prompt)


@pytest.mark.parametrize("threshold", [0, 2, STEPS])
def test_with_a_threshold_more_than_so_many_steps_must_remain(opened: Open, threshold: int) -> None:
    """After a fresh draft, steps are used one by one. Resampling ends when at most `threshold` remain."""
    with opened(threshold=threshold) as runtime:
        drafter = lyanna_of(runtime)
        seen: set[int] = set()
        drafted = drafter.resample

        def observed(batch: list[Request], budgets: list[Budget]) -> list[DraftTree]:
            seen.update(STEPS - seq.drafting[drafter].used for seq in batch)
            return drafted(batch, budgets)

        drafter.resample = observed  # type: ignore[method-assign]
        runtime.generate(PROMPTS[:3], PARAMS, speculation=SpeculationParams(budget=FULL))
    assert seen == set(range(threshold + 1, STEPS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1}, "threshold must be a number of steps from 0, not -1"),
        ({"threshold": True}, "threshold must be a number of steps from 0, not True"),
        ({"resample": 1}, "resample must be one of true, false, union, not 1"),
        ({"depth": 3}, "unknown key depth"),
    ],
)
def test_bad_options_of_the_drafter_are_refused(opened: Open, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message), opened(**options):
        pass


# --- pending rows while other methods draft ---------------------------------------------------------------------------


def state(drafter: LyannaDrafter, name: str) -> np.ndarray:
    """Return the drafter's state of every slot."""
    return array_of(drafter._state[name])


def chains(drafter: LyannaDrafter) -> np.ndarray:
    """Return the logits of the steps of the latest draft of every slot."""
    return state(drafter, names.CHAIN_LOGITS)


def check_state(runtime: Runtime, reference: Runtime, batch: list[Request]) -> None:
    """A draft now, after any history, must equal that of a drafter that computed the text at once."""
    drafter, other = lyanna_of(runtime), lyanna_of(reference)
    trees = drafter.draft(batch, [FULL] * len(batch))
    for slot, seq in enumerate(batch):
        fresh = Request(list(seq.tokens), len(seq.tokens), CONTEXT, frozenset(), Greedy(), slot=0)
        other.begin(fresh)
        fill(reference.verifier, fresh, other)
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


@pytest.mark.parametrize(("max_num_seqs", "seed"), [(1, 0), (3, 1), (3, 2)])
def test_a_draft_does_not_depend_on_earlier_drafts(opened: Open, max_num_seqs: int, seed: int) -> None:
    """Steps without drafts, with lookups, resampled and fresh drafts are in any order, and differ between requests."""
    rng = random.Random(seed)
    kinds = [OfferKind.NONE, OfferKind.LOOKUP, OfferKind.RESAMPLE, OfferKind.RESAMPLE, OfferKind.FRESH]
    with pair(opened, max_num_seqs) as (runtime, reference):
        requests = [request(prompt) for prompt in prompts(5, seed=seed, longest=50)]
        scripts = {id(seq): [rng.choice(kinds) for _ in range(CONTEXT)] for seq in requests}
        drafter, played = Pair(runtime._speculation.drafter("ngram"), lyanna_of(runtime)), set()
        loop = DecodeLoop(runtime.verifier, Speculation(drafter, Scripted(FULL, scripts)))
        waiting, steps, batch = list(requests), 0, loop.scheduler.slots.running
        while waiting or batch:
            while waiting and len(batch) < max_num_seqs:
                waiting[0].record = lambda seq, plan, tree, outcome: played.add(plan.kind)
                admit(loop, waiting.pop(0))
            loop.step()
            steps += 1
            if batch and steps % 5 == 0:
                check_state(runtime, reference, batch)
                for seq in batch:  # their drafts are not verified: no steps remain, and no row is pending
                    scripts[id(seq)][seq.counters.steps] = OfferKind.NONE
    assert played == set(kinds)


def test_many_pending_rows_are_computed_in_chunks(opened: Open) -> None:
    """More rows are pending than one call takes. Another sequence has none, and can still resample."""
    with pair(opened, 2) as (runtime, reference):
        drafter = lyanna_of(runtime)
        first, second = request([5, 6]), request([7, 8, 9])
        scripts = {id(first): [], id(second): [OfferKind.NONE] * 70 + [OfferKind.FRESH]}
        loop, batch = admitted(runtime, [first, second], scripts)
        for _ in range(70):
            loop.step()
        assert first.drafting[drafter].pending > CATCH_UP
        loop.step()
        slot = batch.index(second)
        assert second.drafting[drafter].used < STEPS
        kept = chains(drafter)[slot].copy()
        drafter.draft(batch, [FULL if seq is first else NO_SPECULATION for seq in batch])
        assert np.array_equal(chains(drafter)[slot], kept)
        loop.step()
        check_state(runtime, reference, batch)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_several_sequences_put_off_the_rows_of_prompts_until_they_draft(
    opened: Open, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single sequence computes them with the prompt. Drafts are those of another drafter either way."""
    with pair(opened, max_num_seqs) as (runtime, reference):
        drafter, calls = lyanna_of(runtime), list[str]()
        run = drafter._run
        monkeypatch.setattr(drafter, "_run", lambda graph, work: calls.append(graph) or run(graph, work))
        loop, batch = admitted(runtime, [request([3, 4] * 38)])
        for _ in range(5):
            loop.step()
        assert calls == ([names.DRAFT] if max_num_seqs == 1 else [])
        drafter.catch_up(batch, [NO_SPECULATION])
        assert len(calls) == 2 - max_num_seqs
        drafter.catch_up(batch, [FULL])
        assert calls == [names.DRAFT]
        check_state(runtime, reference, batch)


def test_rows_that_wait_move_to_other_slots_and_requests(opened: Open) -> None:
    """A request moves when the one before it ends. Its rows then serve a third, which begins with the same tokens."""
    with pair(opened, 2) as (runtime, reference):
        first, second = request([5, 6, 7]), request([3, 4] * 38)
        first.limit, second.limit = 6, 80
        loop, batch = admitted(runtime, [first, second])
        while first in batch:
            loop.step()
        assert batch == [second]
        assert second.drafting[lyanna_of(runtime)].pending > CATCH_UP
        check_state(runtime, reference, batch)
        runtime.forget_prefixes()

        second, third = request([3, 4] * 38), request([3, 4] * 36 + [9, 8, 7])
        second.limit = 80
        loop, batch = admitted(runtime, [second], {id(second): [], id(third): []})
        while loop.busy:
            loop.step()
        third.speculation = second.speculation
        loop.add(third)
        while third not in batch:
            loop.step()
        assert third.cached_tokens == CATCH_UP
        assert third.drafting[lyanna_of(runtime)].pending > CATCH_UP
        check_state(runtime, reference, batch)


def test_only_so_many_rows_of_a_prompt_wait(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_WAITING", 72)
    with pair(opened, 2) as (runtime, reference):
        _, batch = admitted(runtime, [request([3, 4] * 38), request([3, 4] * 35)])
        waiting = [seq.drafting[lyanna_of(runtime)].pending for seq in batch]
        assert waiting == [75 - CATCH_UP, 69]
        check_state(runtime, reference, batch)


def test_a_second_draft_of_the_same_text_is_refused(opened: Open) -> None:
    """Without a first row, the graph would draft from old inputs."""
    with opened() as runtime:
        drafter, seq = lyanna_of(runtime), request([5, 6, 7])
        admitted(runtime, [seq])
        drafter.draft([seq], [FULL])
        with pytest.raises(ValueError, match="nothing was committed since the last draft"):
            drafter.draft([seq], [FULL])


def noisy_tree(runtime: Runtime, seq: Request, slot: int, nodes: int) -> Tree:
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


def test_drafts_are_algorithm_1s_and_resampled_trees_algorithm_2s_with_the_noise_of_absolute_positions(
    opened: Open,
) -> None:
    """A step later, the unused steps have the same positions as before, now nearer to the root.

    A sequence that moves to another slot keeps its steps.
    """
    with opened(4) as runtime:
        drafter = lyanna_of(runtime)
        texts = [5, 6, 7], [8, 9, 3, 4], [2, 3], [7, 7]
        requests = [request(text, noise) for text, noise in zip(texts, (*SAMPLED, NO_NOISE), strict=True)]
        loop, batch = admitted(runtime, requests)
        for slot, tree in enumerate(drafter.draft(batch, [FULL] * 4)):
            assert_same_tree(tree, noisy_tree(runtime, batch[slot], slot, drafter.shape.nodes))
        for used in (1, 2):
            loop.step()
            expected = [noisy_tree(runtime, seq, slot, drafter.shape.resample_nodes) for slot, seq in enumerate(batch)]
            for slot, tree in enumerate(drafter.resample(batch, [FULL] * 4)):
                assert batch[slot].drafting[drafter].used == used
                assert_same_tree(tree, expected[slot])
        drafter.move(batch[3], 3, 0)
        (moved,) = drafter.resample([batch[3]], [FULL])
        assert_same_tree(moved, expected[3])


def test_calls_leave_out_the_slots_that_nobody_drafts_for(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of slots with a budget has a call of its own, with its requests' noise. Others keep their chains."""
    with opened(4) as runtime:
        drafter, calls = lyanna_of(runtime), list[tuple[str, range]]()
        texts = [5, 6, 7], [8, 9], [2, 3], [7, 7]
        requests = [request(text, noise) for text, noise in zip(texts, (NO_NOISE, *SAMPLED), strict=True)]
        loop, batch = admitted(runtime, requests)
        call = drafter._call
        monkeypatch.setattr(drafter, "_call", lambda *key: (calls.append(key[:2]), call(*key))[1])
        budgets = [NO_SPECULATION, FULL, NO_SPECULATION, FULL]
        trees = drafter.draft(batch, budgets)
        assert calls == [(names.DRAFT, range(1, 2)), (names.DRAFT, range(3, 4))]
        kept = chains(drafter)[1].copy()
        others = drafter.draft(batch, [FULL, NO_SPECULATION, FULL, NO_SPECULATION])
        assert np.array_equal(chains(drafter)[1], kept)
        for slot, made in enumerate([others, trees, others, trees]):
            assert_same_tree(made[slot], noisy_tree(runtime, batch[slot], slot, drafter.shape.nodes))
            assert len(made[slot ^ 1]) == 1
        loop.step()
        calls.clear()
        trees = drafter.resample(batch, [NO_SPECULATION, NO_SPECULATION, FULL, FULL])
        assert calls == [(names.RESAMPLE, range(2, 4))]
        for slot in (2, 3):
            expected = noisy_tree(runtime, batch[slot], slot, drafter.shape.resample_nodes)
            assert_same_tree(trees[slot], expected)


def test_memory_does_not_grow_with_the_sizes_of_calls(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of all sizes share the rows of hidden states that they read. There are hundreds of sizes."""
    made: list[tuple[int, ...]] = []
    empty = HostDevice.empty
    with opened(3) as runtime:
        drafter = lyanna_of(runtime)
        drafter._call(names.DRAFT, range(3), CATCH_UP)
        monkeypatch.setattr(HostDevice, "empty", lambda *given: (made.append(given[2:]), empty(*given))[1])
        for width in range(1, CATCH_UP):
            drafter._call(names.DRAFT, range(2), width)
    assert made
    assert not [shape for shape in made if len(shape) == 3 and shape[-1] == HIDDEN]


def test_rows_of_several_slots_take_memory_in_small_pages(opened: Open) -> None:
    """In large ones, the first row of each head of each slot takes two megabytes."""
    with opened(2) as runtime:
        rows = state(lyanna_of(runtime), names.key_cache(0))
        inside, maps = rows.ctypes.data + rows.nbytes // 2, Path("/proc/self/smaps").read_text()
    (flags,) = [
        flags
        for low, high, flags in re.findall(r"^(\w+)-(\w+) .*?^VmFlags: ([^\n]*)", maps, re.MULTILINE | re.DOTALL)
        if int(low, 16) <= inside < int(high, 16)
    ]
    assert "nh" in flags.split()


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
        loop, batch = admitted(runtime, [*others, late])
        for pending in (2, 17):
            drafter.draft(batch, [FULL if seq is late else NO_SPECULATION for seq in batch])
            for _ in range(pending):
                loop.step()
            assert late.drafting[drafter].pending == pending
        assert len(late.tokens) == 72 + 19 < CONTEXT
        assert late.drafting[drafter].cache_len + 32 > CONTEXT + STEPS
        check_state(runtime, reference, batch)


def test_a_batch_with_one_sequence_near_the_end_drafts_for_the_others(opened: Open) -> None:
    """The most pending rows of a batch set the width of all, and the other sequences' rows are padded."""
    with pair(opened, 2) as (runtime, reference):
        late, early = request([5, 6, 7, 8] * 22), request([9, 3, 4] * 10)
        _, batch = admitted(runtime, [late, early])
        check_state(runtime, reference, batch)


def test_measurements_beside_a_running_request_do_not_change_its_text(
    lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: list[list[int]]
) -> None:
    """A first request with trees opens another engine, and compares and measures calls, which overwrite rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Runtime.open(lyanna_bundle, threads=1, verify=False) as runtime:
        seen = threading.Event()
        running = runtime.submit(ALL[0], PARAMS, "none", on_output=lambda output: (seen.set(), time.sleep(0.01)))
        assert seen.wait(20)
        second = runtime.submit(ALL[1], PARAMS, SpeculationParams("lyanna", budget=FULL))
        assert [list(one.result(60).token_ids) for one in (running, second)] == plain[:2]


def test_steps_pause_once_to_open_a_drafter_and_once_to_time_its_calls(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(2) as runtime:
        pauses = Mock(side_effect=runtime._thread.paused)
        monkeypatch.setattr(runtime._thread, "paused", pauses)
        ways = [("none", 0), (SpeculationParams("lyanna", budget=FULL), 1), ("lyanna", 2), ("ngram+lyanna", 2),
                (SpeculationParams("lyanna", budget=Budget(3, 3, 1)), 2), ("ngram", 2)]  # fmt: skip
        for way, expected in ways:
            runtime.generate([[5, 6, 7]], PARAMS, way)
            assert pauses.call_count == expected, way


@pytest.mark.parametrize("method", ["lyanna", "mtp", "trained"])
@pytest.mark.parametrize("shared", [33, 40, 63, 79])
def test_a_shared_prefix_changes_no_draft(
    lyanna_bundle: Path, several: Path, unmeasured: None, method: str, shared: int
) -> None:
    """The same steps, drafted and accepted tokens as without the rows of an earlier request, and fewer rows."""
    path = lyanna_bundle if method == "lyanna" else several
    how = SpeculationParams(method, budget=Budget(12, STEPS, 3))
    first, second = prompts(2, seed=shared, longest=2)[0] + [5, 6, 7, 8] * 20, [9, 4]
    later = first[:shared] + second
    with Runtime.open(path, threads=1, verify=False, max_num_seqs=2) as runtime:
        (alone,) = runtime.generate([later], PARAMS, how)
        runtime.forget_prefixes()
        runtime.generate([first], PARAMS, how)
        (again,) = runtime.generate([later], PARAMS, how)
    assert again.cached_tokens >= shared - 32
    assert again.cached_tokens > 0
    assert again.token_ids == alone.token_ids
    counts = [(m.num_steps, m.num_draft_tokens, m.num_accepted_draft_tokens) for m in (again.metrics, alone.metrics)]
    assert counts[0] == counts[1]


# --- text as it is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "device"), [("none", None), ("ngram", None), ("lyanna", "cpu"), ("ngram+lyanna", None)]
)
def test_pieces_and_their_origins_are_those_of_generate(
    lyanna_bundle: Path, unmeasured: None, method: str, device: str | None
) -> None:
    params, prompt = SamplingParams(max_tokens=40, ignore_eos=True), [5, 6, 7, 5, 6]
    options = {"ngram": {"prompt_lookup_min": 1}}
    with Runtime.open(lyanna_bundle, verify=False, device=device, drafter_options=options) as runtime:
        expected = runtime.generate([prompt], params, "none")[0]
        how = SpeculationParams(method, controller=None if method == "none" else "fixed,gamma=4")
        pieces = runtime.pieces(prompt, params, how)
        found = list(pieces.pieces())
    assert "".join(piece.text for piece in found) == expected.text == pieces.generation.text
    assert len(found) == len(expected.token_ids)
    counts = Counter(piece.origin for piece in found)
    drafted = counts.total() - counts[Origin.VERIFIER]
    assert drafted == pieces.generation.metrics.num_accepted_draft_tokens
    assert (drafted > 0) == (method != "none")
    assert bool(counts[Origin.DRAFTER] + counts[Origin.RESAMPLED]) <= ("lyanna" in method)
    assert bool(counts[Origin.LOOKUP]) <= ("ngram" in method)


def test_trees_of_a_device_can_be_read_after_the_answer(lyanna_bundle: Path, unmeasured: None) -> None:
    prompt, outputs = [5, 6, 7, 5, 6], []
    how = SpeculationParams("lyanna", budget=FULL)
    with Runtime.open(lyanna_bundle, verify=False, device="cpu") as runtime:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        submission = runtime.submit(prompt, params, how, on_output=outputs.append, keep_trees=True)
        assert [one.prompt_length for one in runtime.running] == [len(prompt)]
        tokens = [*prompt, *submission.result(60).token_ids]
        place = len(prompt)
        for output in outputs:
            tree, path = output.step.tree, list(output.step.outcome.path)
            assert tree.on_device or len(tree) == 1
            assert tree.tokens[[0, *path]].tolist() == tokens[place - 1 : place + len(path)][: len(path) + 1]
            place += len(output.token_ids)
    assert place == len(tokens)
    assert any(output.step.tree.on_device for output in outputs)


def test_stopping_ends_the_text_after_the_step(opened: Open) -> None:
    with opened() as runtime:
        pieces = runtime.pieces([5, 6, 7], PARAMS, "none")
        taken = [pieces.abort() or piece for piece in pieces.pieces()]
        tokens = pieces.generation.token_ids
        assert len(tokens) <= len(taken) <= len(tokens) + 1
        assert pieces.generation.finish_reason in ("abort", "length", "stop")
        assert runtime.generate([[5, 6, 7]], PARAMS, "none")[0].token_ids[: len(tokens)] == tokens
