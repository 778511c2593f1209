"""Prompt lookup: its continuations, their probabilities, and learning."""

from __future__ import annotations

import pytest

from redraft.errors import UsageError
from redraft.methods.unbuilt import LONGEST_MATCH, NgramOptions
from redraft.runtime.drafters import load_drafter
from redraft.runtime.drafters.ngram import RANKS, NgramDrafter, NgramIndex
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import Greedy
from redraft.runtime.trees.tree import root_only
from redraft.types import Budget, DraftTree, Outcome
from tests.runtime.fakes import FakeEngine, fake_verifier

WIDE = Budget(nodes=30, depth=5, width=3)


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(fake_verifier(FakeEngine(), 64), NgramOptions())


def draft(drafter: NgramDrafter, text: str, budget: Budget = WIDE) -> tuple[DraftTree, Request]:
    seq = Request([ord(letter) for letter in text], len(text), 100, frozenset(), Greedy())
    drafter.begin(seq)
    (offer,) = drafter.offers(seq, budget) or [None]
    return root_only(seq.tokens[-1]) if offer is None else offer.tree, seq


def branches(tree: DraftTree) -> list[str]:
    """Return the text of every path from the root to a leaf, without the root."""
    texts = [""]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        texts.append(texts[parent] + chr(token))
    return [text for node, text in enumerate(texts) if node and node not in tree.parents.tolist()]


def test_longest_context_first_then_shorter_ones_that_begin_differently(drafter: NgramDrafter) -> None:
    """`abcd` was last followed by XY; `d` also by Q and by X. Only Q begins a new branch."""
    tree, _ = draft(drafter, "dQ--abcdXYZ-abcd")
    assert branches(tree)[0].startswith("XYZ")
    assert [branch[0] for branch in branches(tree)] == ["X", "Q"]


def test_the_latest_of_equal_contexts_comes_first(drafter: NgramDrafter) -> None:
    tree, _ = draft(drafter, "abcd1 abcd2 abcd3 abcd")
    assert [branch[0] for branch in branches(tree)] == ["3", "2", "1"]


def test_a_text_that_repeats_itself_is_continued_past_its_end(drafter: NgramDrafter) -> None:
    tree, _ = draft(drafter, "xyxyxyxy", Budget(8, 8, 1))
    assert branches(tree) == ["xyxyxyxy"]


def test_nothing_known_is_nothing_drafted(drafter: NgramDrafter) -> None:
    assert len(draft(drafter, "abcdefg")[0]) == 1
    assert len(draft(drafter, "a")[0]) == 1


@pytest.mark.parametrize("budget", [Budget(3, 5, 3), Budget(30, 2, 3), Budget(30, 5, 1), Budget(1, 1, 1)])
def test_budgets_are_kept(drafter: NgramDrafter, budget: Budget) -> None:
    tree, _ = draft(drafter, "abcd1xyz abcd2xyz abcd3xyz abcd", budget)
    assert 1 < len(tree) <= budget.nodes + 1
    assert max(map(len, branches(tree))) <= budget.depth
    assert len({branch[0] for branch in branches(tree)}) <= budget.width


def test_probabilities_fall_along_a_branch_and_rise_with_the_context(drafter: NgramDrafter) -> None:
    short = draft(drafter, "dX.....d")[0].log_probs
    long = draft(drafter, "abcdX.....abcd")[0].log_probs
    assert long[1] > short[1]
    assert (long[1:] <= long[:-1]).all()


def test_index_grows_with_the_text_as_if_built_at_once(drafter: NgramDrafter) -> None:
    text = [ord(letter) for letter in "the cat and the dog and the cat and the dog and the"]
    tokens = text[:7]
    growing = NgramIndex(tokens, NgramOptions(), list(drafter._rates))
    for token in text[7:]:
        tokens.append(token)
        growing.extend()
    whole = NgramIndex(text, NgramOptions(), list(drafter._rates))
    assert growing._places == whole._places
    assert growing.grow(WIDE) == whole.grow(WIDE)


def test_every_node_after_the_decoded_path_is_evidence(drafter: NgramDrafter) -> None:
    """The draft is 2 after `xyz abcd` and 1 after `abcd`. The text follows 2 and then differs: 1 hit, 2 misses."""
    tree, seq = draft(drafter, "abcd1xyz abcd2xyz abcd")
    before = list(drafter._rates)
    first, second, third = 8 * RANKS, 4 * RANKS + 1, 9 * RANKS
    drafter.accept(seq, tree, Outcome(tree.tokens, (1,), ord("?"), (ord("2"), ord("?"))))
    changed = {kind for kind, (a, b) in enumerate(zip(before, drafter._rates, strict=True)) if a != b}
    assert changed == {first, second, third}
    assert drafter._rates[first] > before[first]
    assert drafter._rates[second] < before[second]
    assert drafter._rates[third] < before[third]


def test_rates_learned_from_one_request_inform_the_next(drafter: NgramDrafter) -> None:
    old = draft(drafter, "abcdX.....abcd")[0].log_probs[1]
    for _ in range(50):
        tree, seq = draft(drafter, "abcdX.....abcd")
        drafter.accept(seq, tree, Outcome(tree.tokens, (), ord("?"), (ord("?"),)))
    assert draft(drafter, "abcdX.....abcd")[0].log_probs[1] < old - 0.2


def test_tokens_that_were_not_drafted_teach_nothing(drafter: NgramDrafter) -> None:
    tree, seq = draft(drafter, "abcdX.....abcd")
    drafter.accept(seq, tree, Outcome(tree.tokens, (), ord("?"), (ord("?"),)))
    before = list(drafter._rates)
    drafter.accept(seq, tree, Outcome(tree.tokens, (), ord("?"), (ord("?"),)))
    assert drafter._rates == before


@pytest.mark.parametrize("lengths", [(0, 4), (3, 2), (1, 17)])
def test_impossible_context_lengths_are_refused(lengths: tuple[int, int]) -> None:
    options = {"prompt_lookup_min": lengths[0], "prompt_lookup_max": lengths[1]}
    with pytest.raises(UsageError, match="expected 1 <= min <= max"):
        load_drafter("ngram", fake_verifier(FakeEngine(), 64), options)


def test_context_lengths_can_be_chosen() -> None:
    text = "dX-abcdY--abcd"
    for longest, first in ((4, "Y"), (1, "Y")):
        options = {"prompt_lookup_min": longest, "prompt_lookup_max": longest}
        drafter = load_drafter("ngram", fake_verifier(FakeEngine(), 64), options)
        tree, _ = draft(drafter, text)
        assert branches(tree)[0][0] == first
        assert len(branches(tree)) == (1 if longest == 4 else 2)
    assert LONGEST_MATCH >= 4
