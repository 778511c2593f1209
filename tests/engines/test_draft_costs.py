"""When drafting pays, worked out by hand, and what a bundle says about it."""

from __future__ import annotations

import pytest

from redraft.engines.draft_costs import describe_cost, improvement, least_accepted


@pytest.mark.parametrize("accepted", [0.3, 0.8])
@pytest.mark.parametrize("length", [1, 5])
def test_theorem_3_8(accepted: float, length: int) -> None:
    expected = (1 - accepted ** (length + 1)) / ((1 - accepted) * (length * 0.25 + 1))
    assert improvement(accepted, length, 0.25) == pytest.approx(expected)


def test_everything_accepted() -> None:
    assert improvement(1.0, 4, 0.25) == pytest.approx(5 / 2)
    assert improvement(1.0, 4, 0.25, 1.5) == pytest.approx(5 / 2.5)


def test_drafts_of_one_token_break_even_at_the_least_acceptance() -> None:
    assert improvement(least_accepted(0.3), 1, 0.3) == pytest.approx(1)
    assert improvement(least_accepted(0.3, 1, 1.2), 1, 0.3, 1.2) == pytest.approx(1)
    assert least_accepted(0.3, 4, 1.2) == pytest.approx(0.35)


def test_a_build_says_when_drafts_pay() -> None:
    assert describe_cost(0.25, 8) == (
        "a drafted token reads 0.25 times the bytes of a plain step: pays if more than 25 % are accepted; 80 % make "
        "decoding at most 1.69 times as fast"
    )
    assert describe_cost(0.9, 8).endswith("pays if more than 90 % are accepted")
    assert describe_cost(1.0, 8).endswith(": drafting never pays")
