"""Figures of a comparison from generations made by hand: pairs, labels, near-ties, loops."""

from __future__ import annotations

import pytest

from redraft.bench.compare import Run
from redraft.bench.prompts import Prompt
from redraft.bench.summary import summarise, table
from redraft.runtime import Generation
from redraft.runtime.metrics import Metrics

TOKENS = tuple(range(11))


def generation(tokens: tuple[int, ...] = TOKENS, rate: float = 100.0, steps: int = 10, accepted: int = 0) -> Generation:
    """A generation with these figures; a tenth of its time is overhead."""
    metrics = Metrics(steps, steps, 2 * accepted, accepted, 1 + accepted / steps, 0.5, (), rate, 1.0, 0.1, {})
    return Generation("", tokens, "length", 3, metrics)


def runs(*pairs: tuple[Generation, Generation], kinds: str = "aaab") -> list[Run]:
    """A run a pair of plain and n-gram generations."""
    return [
        Run(Prompt(str(i), kinds[i], ""), {"ngram": other, "none": plain}) for i, (plain, other) in enumerate(pairs)
    ]


def unused(run: Run, place: int) -> float:
    raise AssertionError("no gap is asked for where outputs agree")


def test_speed_is_the_median_of_paired_ratios() -> None:
    fast = [generation(rate=r, steps=5, accepted=5) for r in (150.0, 900.0, 400.0)]
    figures = summarise(runs(*zip([generation(rate=r) for r in (100.0, 300.0, 200.0)], fast, strict=True)), unused)
    assert list(figures) == ["none", "ngram"]
    assert figures["ngram"]["speedup"] == 2.0
    assert figures["ngram"]["tokens_per_second"] == 400.0
    assert figures["ngram"]["mean_acceptance_length"] == 2.0
    assert figures["ngram"]["overhead_fraction"] == pytest.approx(0.1)
    assert figures["none"]["speedup"] == 1.0
    assert figures["ngram"]["identical_to_plain"] is True


def test_a_difference_is_named_with_its_gap() -> None:
    other = (*TOKENS[:5], 99, *TOKENS[6:])
    pair = (generation(), generation(other))
    near = summarise(runs(pair), lambda run, place: 5e-5)["ngram"]
    far = summarise(runs(pair), lambda run, place: 0.3)["ngram"]
    assert near["differences"] == [{"prompt": "0", "token": 5, "gap": 5e-5, "near_tie": True}]
    assert (near["identical_to_plain"], near["lossless"]) == (False, True)
    assert (far["identical_to_plain"], far["lossless"]) == (False, False)


def test_an_output_that_goes_on_past_the_plain_one_is_no_near_tie() -> None:
    figures = summarise(runs((generation(), generation((*TOKENS, 99)))), lambda run, place: None)["ngram"]
    assert figures["differences"] == [{"prompt": "0", "token": 11, "gap": None, "near_tie": False}]
    assert figures["lossless"] is False


def test_looping_outputs_are_counted_and_left_out() -> None:
    loop = (1, 2) * 10
    pairs = [(generation(), generation(rate=200.0)), (generation(loop), generation(loop, rate=900.0))]
    figures = summarise(runs(*pairs), unused)["ngram"]
    assert figures["repetition"]["looping_outputs"] == 1
    assert figures["repetition"]["without_looping"]["speedup"] == 2.0
    assert figures["speedup"] == 5.5


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
