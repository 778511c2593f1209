"""Figures of controllers from generations made by hand: Table 2, the equations, and what takes no part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.bench.runs import LOOP, make_generation, make_run
from tests.runtime.fakes import make_runtime

from redraft.bench.compare import PLAIN, Run, Settings, compare
from redraft.bench.controllers import figures, speculations, tables, ways_of
from redraft.bench.plots import Pictures, Step, draw_steps, draw_throughput, steps_of
from redraft.bench.prompts import BenchPrompt
from redraft.errors import UsageError
from redraft.runtime import Budget, Generation, SamplingParams

WAYS = {"fixed": {1: "f1", 4: "f4"}, "heuristic": {1: "h1", 4: "h4"}, "adaptive": {0: "adaptive"}}
generation = partial(make_generation, verify_ms=24.0)
"""Twelve tokens, in twelve steps of 2 ms."""


def run(kind: str = "a", number: int = 0, **changed: Generation) -> Run:
    """Rates: plain 100, fixed lengths 100 and 200, the heuristic 240 and 180, adaptive 300."""
    ways = {
        "none": generation(100),
        "f1": generation(100, 8, 8, 4, draft_ms=8.0),
        "f4": generation(200, 6, 24, 6, draft_ms=12.0),
        "h1": generation(240), "h4": generation(180), "adaptive": generation(300),
    }  # fmt: skip
    return make_run(number, kind, **(ways | changed))


def test_table_2_worked_by_hand() -> None:
    """Fixed lengths have 150 tokens a second in the mean, ± 50; the heuristic 210 ± 30. Over both of its lengths, the
    heuristic takes 1 / 240 + 1 / 180 s for two tokens, fixed lengths 1 / 100 + 1 / 200.
    """
    found = figures([run()], WAYS)["controllers"]
    assert {name: (one["mean_rate"], one["deviation"]) for name, one in found.items()} == {
        "fixed": (1.0, pytest.approx(1 / 3)), "heuristic": (1.4, 0.2), "adaptive": (2.0, 0.0),
    }  # fmt: skip
    heuristic = found["heuristic"]
    assert heuristic["best_fixed_length"] == 4
    ratios = [heuristic[key]["ratio"] for key in ("over_fixed", "over_plain", "over_best_fixed")]
    assert ratios == pytest.approx([54 / 35, 72 / 35, 36 / 35])
    assert heuristic["over_plain"]["rate"] == heuristic["tokens_per_second"] == pytest.approx(2 / (1 / 240 + 1 / 180))


def test_the_equations_worked_by_hand() -> None:
    """Length 4: α = 6 / 24, so Eq. 3 expects 12 / (0.25 · 4 + 1) = 6 steps. A plain call takes 2 ms, a drafted token
    12 ms / 24 = 0.5 ms: c = 4, and Eq. 6 costs 6 · (4 + 4) · 0.5 = 24 ms.
    """
    one, four = figures([run()], WAYS)["equations"]
    assert four == {
        "gamma": 4, "alpha": 0.25, "target_ms": 2.0, "draft_ms": 0.5, "eq1_c": 4.0, "eq2_cost_ms": 24.0,
        "eq3_steps": 6.0, "eq4_target_calls": 6.0, "eq5_draft_calls": 24.0, "eq6_cost_ms": 24.0, "steps": 6,
        "drafted": 24, "measured_ms": 60.0,
    }  # fmt: skip
    assert (one["alpha"], one["eq3_steps"], one["eq1_c"]) == (0.5, 8.0, 2.0)
    length = figures([run()], WAYS)["controllers"]["fixed"]["lengths"]["4"]  # Appendix A
    shares = [length[key] for key in ("draft_acceptance_rate", "mean_draft_length", "mean_acceptance_length")]
    assert shares == [0.25, 4, 2]


def test_kinds_are_apart_and_loops_and_short_texts_take_no_part() -> None:
    looping, short = run("b", 2, none=generation(100, tokens=LOOP)), run("b", 3, h1=generation(9, tokens=(1,)))
    runs = [run(), run("b", 1), looping, short]
    found = figures(runs, WAYS)
    assert (found["outputs"], found["timed"], set(found["kinds"])) == (4, 2, {"a", "b"})
    assert found["differing_outputs"] == 6  # all five others of the looping text, and the short one
    assert figures(runs[2:], WAYS)["controllers"] == {}
    assert tables(figures(runs[2:], WAYS)) == []


def test_tables_show_each_controller_and_length() -> None:
    shown = dict(tables(figures([run(), run("b", 1)], WAYS)))
    whole, first, second, rates, equations = shown.values()
    assert [row[:3] for row in whole[1:]] == [
        ["fixed", "133.3", "1.00 ± 0.33"], ["heuristic", "205.7", "1.40 ± 0.20"], ["adaptive", "300.0", "2.00 ± 0.00"],
    ]  # fmt: skip
    assert first == second == whole
    assert rates == [
        ["controller", "1", "4"],
        ["fixed", "100", "200"],
        ["heuristic", "240", "180"],
        ["adaptive", "-", "-"],
    ]
    assert equations[2] == ["4", "0.25", "4.0", "48", "12", "48", "48", "12", "48", "120"]


def test_ways_are_controllers_with_each_first_length() -> None:
    ways = ways_of(["adaptive", "gammatune,delta=1"], (1, 4))
    assert ways == {
        "fixed": {1: "fixed,gamma=1", 4: "fixed,gamma=4"},
        "adaptive": {0: "adaptive"},
        "gammatune,delta=1": {1: "gammatune,delta=1,gamma=1", 4: "gammatune,delta=1,gamma=4"},
    }
    asked = speculations(ways, "ngram", Budget(3, 3, 1))
    assert len(asked) == 5
    assert asked["gammatune,delta=1,gamma=4"].rule.gamma == 4
    with pytest.raises(UsageError, match="gamma is the first length"):
        ways_of(["gammatune,gamma=3"], (1,))
    with pytest.raises(UsageError, match="unknown controller"):
        ways_of(["gamatune"], (1,))


def test_controllers_decode_the_same_texts_and_are_drawn(tmp_path: Path) -> None:
    """The toy verifier: every way writes the plain text, and the steps of a fixed length of 2 draft at most 2."""
    runtime, params = make_runtime(), SamplingParams(max_tokens=40)
    ways = ways_of(["gammatune+", "adaptive"], (1, 2))
    settings = Settings(params, ways=speculations(ways, "ngram", None))
    runs = compare(runtime, [BenchPrompt("p", "k", "abcabcabc")], list(settings.ways), settings)
    assert {tuple(one.token_ids) for one in runs[0].generations.values()} == {runs[0].generations[PLAIN].token_ids}
    steps = steps_of(runtime, runs[0].token_ids, params, settings.ways["fixed,gamma=2"])
    assert sum(1 + step.accepted for step in steps) >= 40
    assert max(step.drafted for step in steps) == 2
    assert [step.position for step in steps[:2]] == [0, 1 + steps[0].accepted]
    pictures = Pictures(tmp_path / "plots", "title")
    draw_throughput(figures(runs, ways) | {"plain_tokens_per_second": 1.0}, pictures)
    draw_steps({"fixed,gamma=2": steps, "none": [Step(1, 0, 0)]}, pictures, "one text")
    paths = [path for some in pictures.files.values() for path in some]
    assert [path.name for path in paths] == ["throughput.png", "throughput.svg", "steps.png", "steps.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write plots"):
        draw_steps({"none": [Step(1, 0, 0)]}, Pictures(tmp_path / "file", "title"), "one text")
