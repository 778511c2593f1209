"""When drafting pays, worked out by hand, and what bundles and benches say about it."""

from __future__ import annotations

import pytest

from redraft.bench.break_even import describe_cost, describe_measured, improvement, least_accepted, measured
from redraft.runtime.metrics import Metrics


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
    text = "a drafted token reads 0.25 times the bytes of a plain step"
    assert (
        describe_cost(0.25, 8)
        == f"{text}: pays if more than 25 % are accepted; 80 % make decoding at most 1.69 times as fast"
    )
    assert describe_cost(0.9, 8).endswith("pays if more than 90 % are accepted")
    assert describe_cost(1.0, 8).endswith(": drafting never pays")


def run(steps: int, drafts: int, drafted: int, accepted: int, draft_ms: float, verify_ms: float) -> Metrics:
    stages = {"draft": draft_ms, "verify": verify_ms, "resample": 0.0, "host": 0.0}
    return Metrics(steps, drafts, drafted, accepted, 1.0, 0.0, (), 1.0, 1.0, 0.0, stages)


def test_measured_drafts() -> None:
    """Plain steps take 10 ms. Of ten steps, eight draft 2 tokens, 3 ms each, and take 14 ms to verify."""
    plain, other = run(20, 0, 0, 0, 0.0, 200.0), run(10, 8, 16, 10, 48.0, 132.0)
    found = measured([(plain, other)])
    assert found == {
        "draft_length": pytest.approx(2), "draft_cost": pytest.approx(0.3), "drafts_pay_above": pytest.approx(0.5)
    }  # fmt: skip
    line = describe_measured({**found, "draft_acceptance_rate": 0.625})
    assert line == (
        "drafts of 2.0 tokens, each 0.30 times a plain step: they pay if more than 50 % are accepted; 62 % were"
    )


def test_the_measured_share_decides_what_is_faster() -> None:
    """Ten tokens accepted of twenty are exactly as fast as plain decoding if half of them must be."""
    plain, other = run(20, 0, 0, 0, 0.0, 200.0), run(10, 10, 20, 10, 60.0, 140.0)
    assert measured([(plain, other)])["drafts_pay_above"] == pytest.approx(0.5)


def test_nothing_drafted() -> None:
    assert measured([(run(20, 0, 0, 0, 0.0, 200.0),) * 2]) == {}
