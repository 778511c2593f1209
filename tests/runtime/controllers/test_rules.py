"""Traces of each rule against examples worked by hand, and the names and options of controllers."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import pytest

from redraft.errors import UsageError
from redraft.runtime.controllers import CONTROLLERS, parse_controller, split_controllers
from redraft.runtime.controllers.rules import (
    Confidence,
    GammaTune,
    GammaTunePlus,
    Heuristic,
    LengthRule,
    Svip,
    least_entropies,
)
from redraft.runtime.trees.tree import make_tree
from tests.runtime.drafts import chain

ROOM = 99


def lengths(rule: LengthRule, accepted: Sequence[int | None]) -> list[int]:
    """Return γ of each draft, and of the one after the last. None accepts the whole draft."""
    average, found = float(rule.gamma), [rule.length(rule.gamma)]
    for count in accepted:
        average = rule.update(average, found[-1], found[-1] if count is None else count, ROOM)
        found.append(rule.length(average))
    return found


# --- GammaTune -------------------------------------------------------------------------------------------------------


def test_gammatune_worked_by_hand() -> None:
    """η = 0.5, δ = 2. γ = 4, all accepted: A = 4 + 2, γ̄ = (4 + 6) / 2 = 5. Then A = 2: γ̄ = 3.5, γ = 4. Then A = 4 = γ
    counts as 6: γ̄ = 4.75, γ = 5. Then A = 0: γ̄ = 2.375, γ = 3, and A = 1: γ̄ = 1.6875, γ = 2.
    """
    rule = GammaTune(gamma=4, eta=0.5, delta=2)
    assert lengths(rule, [4, 2, 4, 0, 1]) == [4, 5, 4, 5, 3, 2]
    assert rule.update(3.5, 4, 4, ROOM) == 4.75


def test_gammatune_grows_while_all_is_accepted_up_to_its_maximum() -> None:
    """Without δ the average of accepted tokens could never exceed γ, as Algorithm 1 reads literally."""
    assert lengths(GammaTune(gamma=1, eta=0.5, delta=2, gamma_max=5), [None] * 6) == [1, 2, 3, 4, 5, 5, 5]
    assert lengths(GammaTune(gamma=3, eta=0.5, delta=0), [None] * 3) == [3, 3, 3, 3]


def test_gammatune_shrinks_to_its_minimum() -> None:
    """η = 1 forgets at once: γ̄ = A = 0, raised to the minimum."""
    assert lengths(GammaTune(gamma=9, eta=1.0, gamma_min=2), [0, 0]) == [9, 2, 2]
    assert lengths(GammaTune(gamma=9, eta=0.5), [0] * 5) == [9, 5, 3, 2, 1, 1]


def test_a_draft_that_ended_before_its_length_does_not_count_as_whole() -> None:
    """All three of its tokens were accepted, but γ = 5."""
    assert GammaTune(gamma=5, eta=0.5, delta=2).update(5.0, 3, 3, ROOM) == 4.0


def test_a_draft_that_the_room_cut_short_is_no_rejection() -> None:
    """γ = 8 with room for two: two accepted ones say nothing of a third, and do not lower γ̄. One accepted one does."""
    rule = GammaTune(gamma=8, eta=0.5, delta=2)
    assert rule.update(8.0, 2, 2, 2) == 8.0
    assert rule.update(8.0, 2, 1, 2) == 4.5
    assert rule.update(3.5, 3, 3, 3) == 4.25  # A = 3 + 2 is above the average
    assert rule.update(8.0, 2, 2, ROOM) == 5.0  # the drafter ended it


# --- the other rules -------------------------------------------------------------------------------------------------


def test_the_heuristic_worked_by_hand() -> None:
    assert lengths(Heuristic(gamma=2), [2, 4, 5, 0, 4]) == [2, 4, 6, 5, 4, 6]
    assert lengths(Heuristic(gamma=2), [0, 0, 0]) == [2, 1, 1, 1]


def test_the_heuristic_grows_from_what_was_drafted() -> None:
    """A drafter may draft less than it is asked for."""
    average = 5.0
    for _ in range(9):
        average = Heuristic().update(average, 3, 3, ROOM)
    assert average == 5.0
    assert Heuristic().update(average, 3, 1, ROOM) == 4.0


def test_a_first_length_outside_gammatunes_bounds_is_moved_into_them() -> None:
    assert GammaTune(gamma=30).length(30.0) == 24
    assert GammaTune(gamma=1, gamma_min=5).length(1.0) == 5


def test_svip_stops_no_branch_inside_a_call() -> None:
    """Its rule needs all siblings there."""
    assert Svip(width=2).confidence == 0.0 < Svip().confidence


@pytest.mark.parametrize("rule", [LengthRule(gamma=3), Confidence(gamma=3), Svip(gamma=3)])
def test_other_rules_keep_their_length(rule: LengthRule) -> None:
    assert lengths(rule, [0, None, 1]) == [3, 3, 3, 3]


@pytest.mark.parametrize("rule", [Confidence(threshold=0.4), GammaTunePlus(threshold=0.4)])
def test_a_draft_ends_after_the_first_token_below_the_threshold(rule: LengthRule) -> None:
    """The joint probability falls under 0.4 at the third token already, which does not count."""
    draft = chain(0.9, 0.6, 0.5, 0.3, 0.9)
    assert rule.stop(draft).tokens.tolist() == [0, 1, 2, 3, 4]
    assert rule.stop(chain(0.9, 0.5)).tokens.tolist() == [0, 1, 2]
    assert rule.stop(chain(0.1, 0.9)).tokens.tolist() == [0, 1]
    assert rule.confidence == 0.4


def test_a_tree_ends_at_each_uncertain_node_alone() -> None:
    """Nodes 1 (0.5) and 2 (0.3) are children of the root, 3 and 4 theirs, 5 the child of 3."""
    tree = make_tree([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 3], [1.0, 0.5, 0.3, 0.4, 0.29, 0.35])
    kept = Confidence(threshold=0.4).stop(tree)
    assert kept.tokens.tolist() == [9, 1, 2, 3, 5]
    assert kept.parents.tolist() == [-1, 0, 0, 1, 3]
    assert kept.log_probs.tolist() == pytest.approx([log(p) for p in (1.0, 0.5, 0.3, 0.4, 0.35)], rel=1e-5)
    assert Confidence(threshold=0.0).stop(tree) is tree


def test_svip_ends_a_chain_where_its_probability_bounds_the_entropy() -> None:
    """0.3² / 0.15 = 0.6 nats: a token of probability 0.56 has an entropy of at least 0.58, one of 0.54 of 0.62."""
    rule = Svip(threshold=0.3)
    assert rule.most_entropy == pytest.approx(0.6)
    assert rule.confidence == pytest.approx(exp(-0.6))
    assert len(rule.stop(chain(0.56, 0.9, 0.54, 0.99))) == 4
    assert len(rule.stop(chain(0.56, 0.9, 0.56, 0.99))) == 5


def test_svip_bounds_the_entropy_by_all_siblings() -> None:
    """The root's children have 0.7 and 0.2, others at most 0.2 each: 0.7 · 0.357 + 0.2 · 1.609 + 0.1 · 1.609."""
    tree = make_tree([9, 1, 2, 3], [-1, 0, 0, 1], [1.0, 0.7, 0.2, 0.7])
    assert least_entropies(tree) == pytest.approx([0.7325, 0.0, 0.0, 0.0], abs=1e-4)
    assert Svip(threshold=0.3).stop(tree).tokens.tolist() == [9, 1, 2]
    assert Svip(threshold=0.4).stop(tree) is tree
    exact = make_tree([9, 1, 2], [-1, 0, 0], [1.0, 0.5, 0.5])
    assert least_entropies(exact)[0] == pytest.approx(log(2))


# --- names and options -----------------------------------------------------------------------------------------------


def test_names_and_options() -> None:
    assert parse_controller("adaptive") == ("adaptive", None)
    assert parse_controller("fixed") == ("fixed", None)
    assert parse_controller("fixed,gamma=4") == ("fixed", LengthRule(4))
    assert parse_controller("gammatune+, eta=1 ,threshold=0.2")[1] == GammaTunePlus(eta=1.0, threshold=0.2)
    assert [parse_controller(name)[0] for name in CONTROLLERS] == list(CONTROLLERS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gamatune", "unknown controller 'gamatune'"),
        ("adaptive,gamma=2", "adaptive has no options"),
        ("gammatune,gamma", "expected option=value, not 'gamma'"),
        ("gammatune,gamma=x", "expected a number, not 'x'"),
        ("gammatune,tau=0.3", "controller gammatune: unknown key tau"),
        ("fixed,gamma=0", "gamma must be at least 1"),
        ("heuristic,width=0", "width must be at least 1"),
        ("gammatune,gamma=1.5", "gamma"),
        ("gammatune,eta=1.5", "eta must be from 0 to 1"),
        ("gammatune,eta=nan", "eta must be from 0 to 1"),
        ("gammatune,delta=-1", "delta must be at least 0"),
        ("gammatune,gamma_min=9,gamma_max=3", "expected 1 <= gamma_min <= gamma_max"),
        ("gammatune+,threshold=2", "threshold must be from 0 to 1"),
        ("confidence,threshold=-1", "threshold must be from 0 to 1"),
        ("svip,threshold=-1", "threshold must be from 0 to 10"),
        ("svip,threshold=nan", "threshold must be from 0 to 10"),
        ("svip,threshold=1e200", "threshold must be from 0 to 10"),
        ("gammatune,eta=0.5,eta=0.2", "eta is given twice"),
    ],
)
def test_bad_controllers_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_controller(text)
    assert words in str(caught.value)


def test_options_in_a_list_follow_their_name() -> None:
    assert split_controllers("adaptive, gammatune,delta=1,eta=0.5,heuristic") == [
        "adaptive", "gammatune,delta=1,eta=0.5", "heuristic",
    ]  # fmt: skip
