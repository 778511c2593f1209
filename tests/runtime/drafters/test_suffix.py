"""Suffix decoding: trees from counts, learning, and earlier outputs that only their tenant uses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from redraft.errors import UsageError
from redraft.methods.unbuilt import SuffixOptions
from redraft.runtime import Runtime, SpeculationParams
from redraft.runtime.drafters import load_drafter
from redraft.runtime.drafters.base import Pair
from redraft.runtime.drafters.suffix import SuffixDrafter
from redraft.runtime.drafters.suffix_tree import SuffixStore, SuffixTree
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.steps.verifier import Verifier
from redraft.types import Budget, DraftTree, Outcome
from tests.runtime.fakes import FakeEngine, fake_verifier, greedy, make_runtime, plain

WIDE = Budget(nodes=30, depth=30, width=30)
FREE = SuffixOptions(suffix_decoding_max_spec_factor=100.0, suffix_decoding_min_token_prob=0.0)
OPTIONS = {"suffix": {"suffix_decoding_max_cached_requests": 8}}


def fake() -> Verifier:
    return fake_verifier(FakeEngine(), 64)


def make(options: SuffixOptions = FREE) -> SuffixDrafter:
    return SuffixDrafter(fake(), options)


def sequence(drafter: SuffixDrafter, text: str, tenant: str | None = None) -> Request:
    seq = Request(list(map(ord, text)), len(text), 400, frozenset(), Greedy(), tenant=tenant)
    drafter.begin(seq)
    return seq


def trees(drafter: SuffixDrafter, seq: Request, budget: Budget = WIDE) -> list[DraftTree]:
    return [offer.tree for offer in drafter.offers(seq, budget)]


def draft(text: str, options: SuffixOptions = FREE, budget: Budget = WIDE) -> DraftTree:
    drafter = make(options)
    (tree,) = trees(drafter, sequence(drafter, text), budget)
    return tree


def paths(tree: DraftTree) -> dict[str, float]:
    """Return the joint probability of every path from the root, without the root."""
    texts = [""]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        texts.append(texts[parent] + chr(token))
    return {text: math.exp(float(p)) for text, p in zip(texts[1:], tree.log_probs[1:], strict=True)}


def test_frequencies_are_counts_of_the_longest_context() -> None:
    """` ab` is followed by c twice and by d once. The first `abc` and the b of `xbe` do not count."""
    found = paths(draft("abcK abcL abdM abcN xbe ab"))
    assert {path for path in found if len(path) == 1} == {"c", "d"}
    assert found["c"] == pytest.approx(2 * found["d"])


def test_a_shorter_context_replaces_one_with_few_places_if_it_promises_more() -> None:
    """`1ab` was followed by Z once, `ab` by `cdef` eight times. Learned rates decide which tree promises more."""
    text = "abcdef-" * 8 + "1abZ.1ab"
    drafter = make()
    assert "Z" in paths(trees(drafter, sequence(drafter, text))[0])
    for _ in range(60):
        seq = sequence(drafter, "1abZ.1ab")
        trees(drafter, seq)
        drafter.accept(seq, seq, Outcome((), (), 0, (ord("c"),)))
    assert "cdef" in paths(trees(drafter, sequence(drafter, text))[0])


def test_only_the_longest_context_counts_if_it_has_many_places() -> None:
    found = paths(draft("1abZ." * 3 + "abcdefghij " * 9 + "1ab"))
    assert "Z" in found
    assert "c" not in found


def test_a_text_that_repeats_itself_is_continued_past_its_end() -> None:
    assert "xyxyxyxy" in paths(draft("xyxyxyxy", budget=Budget(8, 8, 1)))


def test_rare_paths_are_left_out() -> None:
    text = "".join(f"ab{letter}." for letter in "cccccccced") + "ab"
    assert {"c", "d", "e"} <= set(paths(draft(text)))
    frequent = paths(draft(text, SuffixOptions(24, 100.0, 0.5)))
    assert "c" in frequent
    assert not {"d", "e"} & set(frequent)


def test_a_path_is_as_frequent_as_all_its_tokens_together() -> None:
    """`c` follows in half of the places, and `cd` in a quarter."""
    text = "abcd1abce2abXd3abXe4ab"
    assert "c" in paths(draft(text, SuffixOptions(24, 100.0, 0.5)))
    assert "cd" not in paths(draft(text, SuffixOptions(24, 100.0, 0.5)))
    assert "cd" in paths(draft(text, SuffixOptions(24, 100.0, 0.25)))


def test_branches_count_towards_the_length() -> None:
    """A context of one token has five continuations. One token may be drafted, the likeliest."""
    text = "ab1acX2acY3ad4ae5a"
    assert set(paths(draft(text, SuffixOptions(suffix_decoding_min_token_prob=0.0)))) == {"c"}
    assert len(paths(draft(text))) == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SuffixOptions(), 3),
        (SuffixOptions(suffix_decoding_max_spec_factor=2.0), 6),
        (SuffixOptions(suffix_decoding_max_spec_factor=0.4), 1),
        (SuffixOptions(suffix_decoding_max_spec_factor=9.0, suffix_decoding_max_tree_depth=8), 7),
        (SuffixOptions(suffix_decoding_max_tree_depth=2), 1),
    ],
)
def test_the_length_follows_that_of_the_context(options: SuffixOptions, expected: int) -> None:
    """`abc` is a context of three tokens. The context and the draft together have at most the depth of the tree."""
    assert len(draft("abcdefghijklmnop..abc", options)) - 1 == expected


def test_the_budget_holds() -> None:
    text = "abcdefghij abcxyz abcdef abc"
    for budget in (Budget(1, 1, 1), Budget(3, 2, 2), Budget(30, 2, 30), Budget(5, 5, 5)):
        tree = draft(text, budget=budget)
        assert 1 < len(tree) <= budget.nodes + 1
        assert max(map(len, paths(tree))) <= budget.depth


def test_nothing_known_is_nothing_offered() -> None:
    drafter = make()
    assert not drafter.offers(sequence(drafter, "abcdefg"), WIDE)
    assert not drafter.offers(sequence(drafter, "a"), WIDE)


def test_rates_of_correct_candidates_are_learned() -> None:
    """Wrong candidates become less likely, correct ones likelier, and the next request begins with these rates."""
    drafter = make()
    text = "abcdef abc"
    before = paths(trees(drafter, sequence(drafter, text))[0])
    for _ in range(40):
        seq = sequence(drafter, text)
        (tree,) = trees(drafter, seq)
        drafter.accept(seq, tree, Outcome((), (), 0, tuple(map(ord, "dZZZ"))))
    after = paths(trees(drafter, sequence(drafter, text))[0])
    assert after["d"] > before["d"]
    assert after["de"] / after["d"] < 0.6 * before["de"] / before["d"]
    assert after["def"] / after["de"] == before["def"] / before["de"]  # nothing is learned after a wrong token


def test_candidates_that_are_correct_as_often_as_they_occur_keep_their_probability() -> None:
    """Each of two continuations is correct in half of the places."""
    drafter = make()
    text = "abcX1abdX2ab"
    for turn in range(300):
        seq = sequence(drafter, text)
        (tree,) = trees(drafter, seq)
        drafter.accept(seq, tree, Outcome((), (), 0, (ord("cd"[turn % 2]),)))
    found = paths(trees(drafter, sequence(drafter, text))[0])
    assert found["c"] == pytest.approx(0.5, abs=0.05)
    assert found["d"] == pytest.approx(0.5, abs=0.05)


def test_outputs_are_drafted_from_by_their_own_tenant_only() -> None:
    drafter = make(SuffixOptions(suffix_decoding_max_cached_requests=4))
    seq = sequence(drafter, "Q:", "one")
    seq.tokens += list(map(ord, "hello world"))
    drafter.finish(seq)
    kept_for_nobody = sequence(drafter, "P:")
    kept_for_nobody.tokens += list(map(ord, "secret text"))
    drafter.finish(kept_for_nobody)
    assert len(drafter.store) == 1
    assert [max(paths(tree), key=len) for tree in trees(drafter, sequence(drafter, "Q:hel", "one"))] == ["lo wo"]
    for tenant in ("two", None):
        assert not trees(drafter, sequence(drafter, "Q:hel", tenant))
        assert not trees(drafter, sequence(drafter, "P:secr", tenant))
    drafter.forget("one")
    assert not trees(drafter, sequence(drafter, "Q:hel", "one"))


def test_prompts_are_context_of_outputs_and_never_drafted() -> None:
    drafter = make(SuffixOptions(suffix_decoding_max_cached_requests=4))
    seq = sequence(drafter, "my password: ", "one")
    seq.tokens += list(map(ord, "fine"))
    drafter.finish(seq)
    assert max(paths(trees(drafter, sequence(drafter, "word: ", "one"))[0]), key=len) == "fine"
    assert not trees(drafter, sequence(drafter, "my pa", "one"))


def test_the_store_drops_the_oldest_outputs_of_all_tenants() -> None:
    store = SuffixStore(max_requests=3, max_tokens=100, depth=4)
    for tenant in ("a", "b", "a", "a"):
        store.add(tenant, [1, 2, 3], [5] * 10)
    assert (len(store), store.tokens) == (3, 39)
    store.add("b", [1], [6] * 80)
    assert (len(store), store.tokens) == (2, 94)
    assert store.tree("a").matches([5, 5])[0].places[0] >> 32 == 3
    store.add("c", [], [7] * 101)
    assert len(store) == 2
    assert store.tree("c") is None
    store.forget("a")
    assert (len(store), store.tokens) == (1, 81)
    assert store.tree("a") is None
    store.add("b", [1], [6] * 99)
    assert (len(store), store.tokens) == (1, 100)


def interrupted(method: str) -> Callable[..., None]:
    """A method of the tree that is interrupted at its fifth call."""
    original, calls = getattr(SuffixTree, method), []

    def run(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        original(*arguments)

    return run


@pytest.mark.parametrize("method", ["_insert", "_take_out"])
def test_an_interrupted_store_forgets_the_tenant_and_goes_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SuffixStore(max_requests=2, max_tokens=1000, depth=4)
    for tenant in ("other", "me"):
        store.add(tenant, [1, 2], [5] * 10)
    with monkeypatch.context() as patch:
        patch.setattr(SuffixTree, method, interrupted(method))
        with pytest.raises(KeyboardInterrupt):
            store.add("me", [1, 2], [6] * 10)
    gone = "me" if method == "_insert" else "other"
    assert store.tree(gone) is None
    for turn in range(5):
        store.add(("me", "other")[turn % 2], [1, 2], [7] * 10)
    assert (len(store), store.tokens) == (2, 24)
    assert {match.length for match in store.tree("me").matches([7, 7])} == {1, 2}


def shared_runtime(max_num_seqs: int = 1) -> Runtime:
    return make_runtime(max_num_seqs=max_num_seqs, options=OPTIONS)


def test_a_repeated_request_takes_fewer_steps_for_the_same_text() -> None:
    prompt = [97, 98, 99]
    runtime = shared_runtime()
    expected = tuple(plain(runtime.verifier.device.engine.rule, prompt, 60))
    how = SpeculationParams("suffix", tenant="me")
    first, second = (runtime.generate([prompt], greedy(60), how)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == expected
    assert second.metrics.num_steps < 0.5 * first.metrics.num_steps
    alone = runtime.generate([prompt], greedy(60), SpeculationParams("suffix"))[0]
    runtime.forget("me")
    forgotten = runtime.generate([prompt], greedy(60), how)[0]
    assert min(alone.metrics.num_steps, forgotten.metrics.num_steps) > 1.5 * second.metrics.num_steps


def test_tenants_and_others_share_a_batch() -> None:
    prompts = [[97, 98, 99], [99, 98], [97, 98, 99], [100]]
    runtime = shared_runtime(max_num_seqs=4)
    rule = runtime.verifier.device.engine.rule
    how = [SpeculationParams("suffix", tenant="me"), "suffix", SpeculationParams("suffix", tenant="you"), "ngram"]
    for _ in range(3):
        found = runtime.generate(prompts, greedy(40), how)
        assert [one.token_ids for one in found] == [tuple(plain(rule, prompt, 40)) for prompt in prompts]


def test_an_unfinished_stream_is_not_kept() -> None:
    runtime = shared_runtime()
    how = SpeculationParams("suffix", tenant="me")
    aborted = runtime.pieces([97, 98, 99], greedy(60), how)
    aborted.abort()
    assert aborted.result().finish_reason == "abort"
    store = runtime._speculation.drafter("suffix").store
    assert len(store) == 0
    "".join(runtime.stream([97, 98, 99], greedy(60), how))
    assert len(store) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_pair_keeps_outputs_as_its_drafters_do(first: bool) -> None:
    suffix, other = make(SuffixOptions(suffix_decoding_max_cached_requests=4)), load_drafter("ngram", fake())
    pair = Pair(suffix, other) if first else Pair(other, suffix)
    pair.check_tenant()
    seq = Request([1, 2], 2, 400, frozenset(), Greedy(), tenant="one")
    pair.begin(seq)
    seq.tokens += [3, 4]
    pair.finish(seq)
    assert len(suffix.store) == 1
    pair.forget("one")
    assert len(suffix.store) == 0
    with pytest.raises(UsageError, match="ngram keeps no earlier outputs"):
        Pair(other, load_drafter("none", fake())).check_tenant()


@pytest.mark.parametrize("tenant", [b"me", 7, "", ("a",), True, None])
def test_a_tenants_key_is_a_text(tenant: object) -> None:
    with pytest.raises(UsageError, match="a tenant's key must be a text"):
        make_runtime().forget(tenant)
    if tenant is not None:  # no tenant
        with pytest.raises(UsageError, match="a tenant's key must be a text that is not empty"):
            SpeculationParams("suffix", tenant=tenant)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (SpeculationParams("suffix", tenant="me"), "suffix keeps no earlier outputs.*max_cached_requests"),
        (SpeculationParams("ngram", tenant="me"), "ngram keeps no earlier outputs"),
        (SpeculationParams("ngram", prediction=[97], tenant="me"), "ngram keeps no earlier outputs"),
        (SpeculationParams("none", tenant="me"), "plain decoding takes no tenant"),
    ],
)
def test_a_tenant_needs_a_store(how: SpeculationParams, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_runtime().generate(["a"], greedy(4), how)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"suffix_decoding_max_cached_tokens": 0},
            "must be at least .* .24., not 0; turn the store off",
        ),
        ({"suffix_decoding_max_cached_requests": -1}, "must be 0 .no store. or above, not -1"),
        ({"suffix_decoding_max_cached_requests": 2.5}, "must be a whole number"),
        ({"suffix_decoding_max_tree_depth": 1}, "must be from 2 to 256, not 1"),
        ({"suffix_decoding_max_tree_depth": 257}, "must be from 2 to 256, not 257"),
        ({"suffix_decoding_max_spec_factor": 0}, "must be above 0, not 0"),
        ({"suffix_decoding_max_spec_factor": math.nan}, "must be above 0, not nan"),
        ({"suffix_decoding_min_token_prob": 1.5}, "must be from 0 to 1, not 1.5"),
        ({"prompt_lookup_max": 3}, "unknown key prompt_lookup_max"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_drafter("suffix", fake(), options)
