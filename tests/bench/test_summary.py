"""Figures of a comparison from generations made by hand: pairs, labels, near-ties, loops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from redraft.bench.compare import Run
from redraft.bench.prompts import Prompt
from redraft.bench.summary import summarise, table
from redraft.runtime import Generation
from redraft.runtime.metrics import Metrics

TOKENS = tuple(range(11))
LOOP = (1, 2) * 32


def generation(tokens: tuple[int, ...] = TOKENS, rate: float = 100.0, steps: int = 10, accepted: int = 0) -> Generation:
    """A generation with these figures; a tenth of its time is overhead."""
    metrics = Metrics(steps, steps, 2 * accepted, accepted, 1 + accepted / steps, 0.5, (), rate, 1.0, 0.1, {})
    return Generation("", tokens, "length", 3, metrics)


def runs(*pairs: tuple[Generation, Generation], kinds: str = "aaab") -> list[Run]:
    """A run for each pair of plain and n-gram generations."""
    return [
        Run(Prompt(str(i), kinds[i], ""), [1], {"ngram": other, "none": plain})
        for i, (plain, other) in enumerate(pairs)
    ]


def unused(run: Run, place: int) -> float:
    raise AssertionError("no margin is computed for equal outputs")


def test_speed_is_the_ratio_of_the_times_of_the_same_runs() -> None:
    """30 tokens take 0.1 + 0.05 + 0.1 s plainly, and half as long otherwise."""
    fast = [generation(rate=r, steps=5, accepted=5) for r in (200.0, 200.0, 400.0)]
    figures = summarise(runs(*zip([generation(rate=r) for r in (100.0, 100.0, 200.0)], fast, strict=True)), unused)
    assert list(figures) == ["none", "ngram"]
    assert figures["ngram"]["speedup"] == 2.0
    assert (figures["none"]["tokens_per_second"], figures["ngram"]["tokens_per_second"]) == (120.0, 240.0)
    assert figures["ngram"]["mean_acceptance_length"] == 2.0
    assert figures["ngram"]["overhead_fraction"] == pytest.approx(0.1)
    assert figures["none"]["speedup"] == 1.0
    assert figures["ngram"]["identical_to_plain"] is True


def test_a_difference_is_named_with_its_gap() -> None:
    other = (*TOKENS[:5], 99, *TOKENS[6:])
    pair = (generation(), generation(other))
    near = summarise(runs(pair), lambda run, place: 5e-5)["ngram"]
    far = summarise(runs(pair), lambda run, place: 0.3)["ngram"]
    assert near["differences"] == [{"prompt": "0", "turn": 1, "token": 5, "logit_margin": 5e-5, "near_tie": True}]
    assert (near["identical_to_plain"], near["lossless"]) == (False, True)
    assert (far["identical_to_plain"], far["lossless"]) == (False, False)


def test_an_output_that_goes_on_past_the_plain_one_is_no_near_tie() -> None:
    figures = summarise(runs((generation(), generation((*TOKENS, 99)))), lambda run, place: None)["ngram"]
    assert figures["differences"] == [{"prompt": "0", "turn": 1, "token": 11, "logit_margin": None, "near_tie": False}]
    assert figures["lossless"] is False


def test_outputs_that_loop_are_counted_and_apart() -> None:
    """The plain output decides: the last pair loops, whatever the other method wrote."""
    pairs = [
        (generation(), generation(rate=200.0, steps=5, accepted=5)),
        (generation(LOOP), generation(LOOP, rate=800.0)),
        (generation(LOOP), generation((*TOKENS, *LOOP[11:]), rate=900.0)),
    ]
    figures = summarise(runs(*pairs, kinds="aab"), lambda run, place: 0.3)
    fast = figures["ngram"]
    assert (fast["outputs"], fast["looping_outputs"], fast["prompts"]) == (3, 2, 3)
    assert fast["speedup"] == pytest.approx((10 + 63 + 63) / (10 / 2 + 63 / 8 + 63 / 9))
    assert (fast["identical_to_plain"], fast["differing_outputs"]) == (False, 1)
    steady = fast["not_looping"]
    assert (steady["speedup"], steady["tokens_per_second"], steady["mean_acceptance_length"]) == (2.0, 200.0, 2.0)
    assert (steady["identical_to_plain"], steady["outputs"], steady["prompts"]) == (True, 1, 1)
    assert figures["none"]["looping_outputs"] == 2
    assert {kind: part["not_looping"]["prompts"] for kind, part in fast["kinds"].items()} == {"a": 1, "b": 0}
    assert fast["kinds"]["b"]["speedup"] == pytest.approx(9.0)


def test_the_table_has_a_row_without_loops_for_all_and_for_kinds_with_loops() -> None:
    pairs = [(generation(), generation()), (generation(LOOP), generation(LOOP)), (generation(), generation())]
    rows = table(summarise(runs(*pairs, kinds="aab"), unused))
    found = [(row[1], row[-3], row[-2], row[-1]) for row in rows if row[0] == "ngram"]
    assert found == [
        ("all", "3", "1 of 3", "yes"),
        ("all, not looping", "2", "0 of 2", "yes"),
        ("a", "2", "1 of 2", "yes"),
        ("a, not looping", "1", "0 of 1", "yes"),
        ("b", "1", "0 of 1", "yes"),
    ]
    assert len({len(row) for row in rows}) == 1


def test_an_interval_needs_six_prompts_whatever_their_turns() -> None:
    """The turns of one chat are one sample."""
    six = [(generation(), generation(rate=200.0))] * 6
    found = summarise(runs(*six, kinds="aaaaab"), unused)
    assert found["ngram"]["speedup_interval"] == [2.0, 2.0]
    assert found["ngram"]["kinds"]["a"]["speedup_interval"] is None
    rows = {row[1]: row for row in table(found) if row[0] == "ngram"}
    assert (rows["all"][4], rows["a"][4]) == ("2.00 to 2.00", "-")
    chat = [replace(run, prompt=Prompt("1", "a", "")) for run in runs(*six, kinds="aaaaaa")]
    assert summarise(chat, unused)["ngram"]["speedup_interval"] is None


@pytest.mark.parametrize("synthetic", [False, True])
def test_the_table_notes_that_every_output_loops(synthetic: bool) -> None:
    figures = summarise(runs((generation(LOOP), generation(LOOP))), unused, synthetic)
    steady = figures["ngram"]["not_looping"]
    assert (steady["prompts"], steady["outputs"], steady["identical_to_plain"]) == (0, 0, None)
    assert "speedup" not in steady
    (row,) = (row for row in table(figures) if row[0].startswith("ngram") and row[1] == "all, not looping")
    assert row[2:] == ["-", "-", "-", "-", "-", "0", "0 of 0", "every output loops"]


def test_outputs_too_short_to_time_do_not_loop() -> None:
    figures = summarise(runs((generation((1, 2)), generation((1, 2)))), unused)
    (row,) = (row for row in table(figures) if row[:2] == ["ngram", "all, not looping"])
    assert row[-3:] == ["0", "0 of 1", "yes"]


def test_outputs_too_short_to_time_are_left_out() -> None:
    short = (generation((1, 2)), generation((1, 2), rate=900.0))
    figures = summarise(runs((generation(), generation(rate=300.0)), short), unused)["ngram"]
    assert (figures["prompts"], figures["speedup"]) == (1, 3.0)


def test_kinds_are_apart_and_synthetic_runs_labelled() -> None:
    pairs = [(generation(), generation(rate=rate)) for rate in (200.0, 200.0, 200.0, 500.0)]
    figures = summarise(runs(*pairs), unused)["ngram"]
    assert {kind: part["speedup"] for kind, part in figures["kinds"].items()} == {"a": 2.0, "b": 5.0}
    forced = summarise(runs(*pairs), unused, synthetic=True)
    assert forced["ngram"]["synthetic_acceptance"] is True
    assert forced["ngram"]["identical_to_plain"] is None
    assert "synthetic_acceptance" not in forced["none"]
    assert "ngram (synthetic)" in {row[0] for row in table(forced)}
