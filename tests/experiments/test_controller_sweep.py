"""The sweep of GammaTune's options: positions of a recorded text, and settings replayed over them."""

from __future__ import annotations

from math import log

import pytest

from experiments.controller_sweep import OTHERS, THRESHOLDS, Position, StepCosts, positions_of, replay, score, sweep
from redraft.runtime.controllers.rules import Confidence, GammaTune, Heuristic, LengthRule

COSTS = StepCosts(draft_ms=[0.0, 1.0, 2.0, 3.0, 4.0], verify_ms=[0.0, 10.0, 11.0, 12.0, 13.0, 14.0])
PROBS = (0.9, 0.8, 0.2, 0.9)
TEXT = [Position(PROBS[place:], 2 - place) for place in range(3)] * 2
"""Twice a chain of four of which two are right; then the verifier's own token."""


def test_a_step_gives_the_rest_of_its_chain_at_every_position_that_it_passed() -> None:
    step = {"log_probs": [0.0, log(0.5), log(0.25), log(0.025)], "path": [1, 2]}
    found = list(positions_of(step))
    assert [(len(one.probs), one.right) for one in found] == [(3, 2), (2, 1), (1, 0)]
    assert found[1].probs == pytest.approx((0.5, 0.1))


@pytest.mark.parametrize(
    ("rule", "saves", "ms"),
    [
        (LengthRule(2), False, 2 * (2 + 12)),  # two right tokens and the bonus, twice
        (LengthRule(4), False, 2 * (4 + 14)),
        (LengthRule(1), False, 2 * ((1 + 11) + (1 + 11))),  # one right token and the bonus, then nothing right
        (Confidence(4, threshold=0.4), False, 2 * (4 + 13)),  # ends after the third token, but drafts four
        (Confidence(4, threshold=0.4), True, 2 * (3 + 13)),
    ],
)
def test_replays_worked_by_hand(rule: LengthRule, saves: bool, ms: float) -> None:
    costs = StepCosts(COSTS.draft_ms, COSTS.verify_ms, saves)
    assert replay(rule, TEXT, costs) == pytest.approx(ms)
    assert score(rule, [TEXT, TEXT], costs) == pytest.approx(1e3 * 12 / (2 * ms))


def test_a_replay_moves_the_length() -> None:
    """The heuristic: 1 is accepted, so 3, of which the drafter has one, which is wrong, so 2, which are right."""
    text = [Position((0.9,), 1), Position((0.9,), 0), Position((0.9,), 0), *TEXT[:3]]
    assert replay(Heuristic(1), text, COSTS) == (1 + 11) + (3 + 11) + (2 + 12)


def test_a_position_without_a_draft_is_a_plain_step() -> None:
    assert replay(GammaTune(gamma=3), [Position((), 0)] * 2, COSTS) == 2 * (3 + 10)


def test_the_sweep_ranks_every_setting_next_to_the_other_rules() -> None:
    """A score that only η = 0.5, δ = 3 and a threshold of 0.3 raise."""

    def score_of(rule: LengthRule) -> float:
        right = (getattr(rule, "eta", 0) == 0.5) + (getattr(rule, "delta", 0) == 3) + (rule.confidence == 0.3)
        return float(rule.gamma + 10 * right)

    found = sweep(score_of)
    best = found["gammatune+"]["first"][0]
    assert (best["eta"], best["delta"], best["threshold"]) == (0.5, 3, 0.3)
    assert found["gammatune+"]["settings"] == found["gammatune"]["settings"] * len(THRESHOLDS)
    assert found["gammatune"]["best"]["delta"]["3"] == found["gammatune"]["best"]["delta"]["1"] + 10
    assert found["gammatune"]["default"]["rule"] == "GammaTune"
    assert [one["rule"] for one in found["others"]] == [type(rule).__name__ for rule in OTHERS]
