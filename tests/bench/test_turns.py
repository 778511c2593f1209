"""The order of turns."""

from __future__ import annotations

from redraft.bench.turns import Flips, in_turns


def test_the_order_flips_within_each_kind_after_a_warm_up() -> None:
    warmed: list[str] = []
    reports: list[str] = []
    orders = list(in_turns(["p", "q"], ["code", "prose", "code", "prose", "code"], warmed.append, reports.append))
    assert warmed == ["p", "q"]
    assert orders == [["p", "q"], ["p", "q"], ["q", "p"], ["q", "p"], ["p", "q"]]
    assert reports == ["warming up p", "warming up q", *(f"prompt {number} of 5" for number in range(1, 6))]


def test_ways_may_differ_between_prompts_of_a_kind() -> None:
    flips = Flips()
    assert [flips.order(("code", "again"), ways) for ways in ("ab", "cd")] == ["ab", "dc"]
    assert flips.order(("code", "first"), "ab") == "ab"
