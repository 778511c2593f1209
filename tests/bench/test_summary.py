"""Figures of a comparison from generations made by hand: pairs, labels, near-ties, loops, bounds, costs of drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.bench.runs import LOOP, TOKENS, make_generation, make_run

from redraft.bench.compare import Run, Totals
from redraft.bench.summary import achieved, break_even, describe_break_even, summarise, table
from redraft.runtime import Generation

Pair = tuple[Generation, Generation]
loop = partial(make_generation, tokens=LOOP)


def runs(*pairs: Pair, kinds: str = "aaab") -> list[Run]:
    """A run for each pair of plain and n-gram generations."""
    return [make_run(i, kinds[i], ngram=other, none=plain) for i, (plain, other) in enumerate(pairs)]


def unused(run: Run, token: int) -> float:
    raise AssertionError("no margin is computed for equal outputs")


def test_speed_is_the_ratio_of_the_times_of_the_same_runs() -> None:
    """36 tokens take 0.12 + 0.06 + 0.12 s plainly, and half as long otherwise."""
    fast = [make_generation(rate, 6, 12, 6) for rate in (200.0, 400.0, 200.0)]
    plain = [make_generation(rate) for rate in (100.0, 200.0, 100.0)]
    figures = summarise(runs(*zip(plain, fast, strict=True)), unused)
    assert list(figures) == ["none", "ngram"]
    assert figures["ngram"]["speedup"] == 2.0
    assert (figures["none"]["tokens_per_second"], figures["ngram"]["tokens_per_second"]) == pytest.approx((120, 240))
    assert (figures["ngram"]["mean_acceptance_length"], figures["ngram"]["draft_acceptance_rate"]) == (2.0, 0.5)
    assert figures["ngram"]["overhead_fraction"] == pytest.approx(0.1)
    assert figures["none"]["speedup"] == 1.0
    assert (figures["ngram"]["identical_to_plain"], figures["ngram"]["tokens"]) == (True, 36)


@pytest.mark.parametrize(
    ("tokens", "token", "margin", "near"),
    [
        ((*TOKENS[:5], 99, *TOKENS[6:]), 5, 5e-5, True),
        ((*TOKENS[:5], 99, *TOKENS[6:]), 5, 0.3, False),
        ((*TOKENS, 99), 12, None, False),
    ],
)
def test_a_difference_is_named_with_its_margin(
    tokens: tuple[int, ...], token: int, margin: float | None, near: bool
) -> None:
    pair = (make_generation(), make_generation(tokens=tokens))
    found = summarise(runs(pair), lambda run, place: margin)["ngram"]
    assert found["differences"] == [
        {"prompt": "0", "turn": 1, "token": token, "logit_margin": margin, "near_tie": near}
    ]
    assert (found["identical_to_plain"], found["lossless"]) == (False, near)
    assert table({"ngram": found})[1][-1] == ("but for 1 near-ties" if near else "NO, 1 differ")


def test_outputs_that_loop_are_counted_and_apart() -> None:
    """The plain output decides: the last pair loops, whatever the other method wrote."""
    pairs = [
        (make_generation(), make_generation(200.0, 6, 12, 6)),
        (loop(), loop(800.0)),
        (loop(), make_generation(900.0, tokens=(*TOKENS, *LOOP[12:]))),
    ]
    figures = summarise(runs(*pairs, kinds="aab"), lambda run, token: 0.3)
    fast = figures["ngram"]
    assert (fast["outputs"], fast["looping_outputs"], fast["prompts"]) == (3, 2, 3)
    assert fast["speedup"] == pytest.approx((12 + 64 + 64) / (12 / 2 + 64 / 8 + 64 / 9))
    assert (fast["identical_to_plain"], fast["differing_outputs"]) == (False, 1)
    steady = fast["not_looping"]
    assert (steady["speedup"], steady["tokens_per_second"], steady["mean_acceptance_length"]) == (2.0, 200.0, 2.0)
    assert (steady["identical_to_plain"], steady["outputs"], steady["prompts"]) == (True, 1, 1)
    assert figures["none"]["looping_outputs"] == 2
    assert {kind: part["not_looping"]["prompts"] for kind, part in fast["kinds"].items()} == {"a": 1, "b": 0}
    assert fast["kinds"]["b"]["speedup"] == pytest.approx(9.0)


def test_the_table_has_a_row_without_loops_for_all_and_for_kinds_with_loops() -> None:
    equal = (make_generation(), make_generation())
    rows = table(summarise(runs(equal, (loop(), loop()), equal, kinds="aab"), unused))
    assert [(row[1], *row[-3:]) for row in rows if row[0] == "ngram"] == [
        ("all", "3", "1 of 3", "yes"),
        ("all, not looping", "2", "0 of 2", "yes"),
        ("a", "2", "1 of 2", "yes"),
        ("a, not looping", "1", "0 of 1", "yes"),
        ("b", "1", "0 of 1", "yes"),
    ]
    assert len({len(row) for row in rows}) == 1


def test_an_interval_needs_six_prompts_whatever_their_turns() -> None:
    """The turns of one chat are one sample."""
    six = [(make_generation(), make_generation(200.0))] * 6
    found = summarise(runs(*six, kinds="aaaaab"), unused)
    assert found["ngram"]["speedup_interval"] == (2.0, 2.0)
    assert found["ngram"]["kinds"]["a"]["speedup_interval"] is None
    rows = {row[1]: row for row in table(found) if row[0] == "ngram"}
    assert (rows["all"][4], rows["a"][4]) == ("2.00 to 2.00", "-")
    chat = [replace(run, prompt=make_run().prompt) for run in runs(*six, kinds="aaaaaa")]
    assert summarise(chat, unused)["ngram"]["speedup_interval"] is None


@pytest.mark.parametrize("synthetic", [False, True])
def test_the_table_notes_that_every_output_loops(synthetic: bool) -> None:
    figures = summarise(runs((loop(), loop())), unused, synthetic)
    steady = figures["ngram"]["not_looping"]
    assert (steady["prompts"], steady["outputs"], steady["identical_to_plain"]) == (0, 0, None)
    assert "speedup" not in steady
    (row,) = (row for row in table(figures) if row[0].startswith("ngram") and row[1] == "all, not looping")
    assert row[2:] == ["-", "-", "-", "-", "-", "0", "0 of 0", "every output loops"]


def test_outputs_too_short_to_time_are_left_out_and_do_not_loop() -> None:
    short = (make_generation(tokens=(1, 2)), make_generation(900.0, tokens=(1, 2)))
    figures = summarise(runs((make_generation(), make_generation(300.0)), short), unused)
    assert (figures["ngram"]["prompts"], figures["ngram"]["speedup"]) == (1, 3.0)
    (row,) = (row for row in table(summarise(runs(short), unused)) if row[:2] == ["ngram", "all, not looping"])
    assert row[-3:] == ["0", "0 of 1", "yes"]


def test_synthetic_runs_are_labelled() -> None:
    forced = summarise(runs((make_generation(), make_generation(200.0))), unused, synthetic=True)
    assert forced["ngram"]["synthetic_acceptance"] is True
    assert forced["ngram"]["identical_to_plain"] is None
    assert "synthetic_acceptance" not in forced["none"]
    assert "ngram (synthetic)" in {row[0] for row in table(forced)}


def test_share_of_the_bound() -> None:
    """Three steps of 3 nodes and one of 1: t(n) is the mean of their costs."""
    drafted = make_generation(150.0, 4, 4, 4, draft_ms=2.0, sizes=(0, 1, 0, 3))
    found = achieved([make_run(lyanna=drafted)], "lyanna", (0.0, 1.4, 2.0, 2.2))
    assert found["verification_ms"] == {"one": 1.4, "step": pytest.approx(2.0)}
    assert (found["mean_acceptance_length"], found["draft_ms"]) == (2.0, 0.5)
    assert found["bound"] == pytest.approx(2 * 1.4 / 2.5)
    assert found["share_of_bound"] == pytest.approx(1.5 / (2 * 1.4 / 2.5))


def test_drafts_pay_above_a_share_that_their_measured_costs_give() -> None:
    """Plain steps take 10 ms. Of ten steps, eight draft 2 tokens, 3 ms each, and take 14 ms to verify."""
    plain = Totals.of([make_generation(steps=20, verify_ms=200.0)])
    other = Totals.of([make_generation(steps=10, drafts=8, drafted=16, accepted=10, draft_ms=48.0, verify_ms=132.0)])
    found = break_even(plain, other)
    assert found == {
        "draft_length": pytest.approx(2), "draft_cost": pytest.approx(0.3), "drafts_pay_above": pytest.approx(0.5)
    }  # fmt: skip
    assert describe_break_even({**found, "draft_acceptance_rate": 0.625}) == (
        "drafts of 2.0 tokens, each 0.30 times a plain step: they pay if more than 50 % are accepted; 62 % were"
    )
    assert break_even(plain, plain) == {}
