"""Predictions from given acceptance and costs: means of steps, the best size, and the break-even."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.bench.runs import make_generation, make_run

from redraft.bench import advice_runs
from redraft.bench.advice import (
    AcceptanceCurve,
    DraftStep,
    StepMs,
    StepTimes,
    advise,
    at,
    best,
    check_table,
    draft_steps,
    draw,
    step_times,
    table,
)
from redraft.bench.advice_runs import in_batches, typical
from redraft.bench.compare import PLAIN, Settings
from redraft.bench.plots import Pictures
from redraft.runtime import SamplingParams
from redraft.runtime.controllers.cost import CostCurve

FRESH = [DraftStep(0, 3, (1, 2)), DraftStep(0, 3, (1,)), DraftStep(0, 3, (3,)), DraftStep(0, 3, ())]


def times(row_ms: float, batch: int = 1, plain_ms: float = 10.0) -> StepTimes:
    """Steps of sequences whose drafted rows cost this. Drafting takes 2 ms, the host nothing."""
    curve = CostCurve((0.0, *(plain_ms + batch * row_ms * n for n in range(9))))
    return step_times(curve, {n: StepMs(curve.table_ms[1 + n], 2.0 if n else 0.0, n) for n in (0, 1, 8)})


def test_steps_of_a_trace() -> None:
    """Ranks are those of a cut. A resampled tree knows how many tokens came since its draft. Cut trees are left out."""

    def line(source: str, log_probs: list[float], path: list[int]) -> dict[str, object]:
        return {
            "position": 1,
            "source": source,
            "log_probs": log_probs,
            "path": path,
            "committed": [0] * (1 + len(path)),
        }

    request = [
        {"request": 0, "prompt": [1], "table_ms": []},
        line("fresh", [0.0, -2.0, -0.5, -3.0], [2, 3]),
        {"table_ms": []},
        line("resample", [0.0, -1.0], []),
        line("resample", [0.0, -1.0], [1]),
        line("none", [0.0], []),
        line("fresh", [0.0, -1.0], [1]),
    ]
    assert [*draft_steps(map(json.dumps, request * 2), max_tokens=9, depth=2)] == [
        DraftStep(0, 3, (1, 3)), DraftStep(3, 1, ()), DraftStep(4, 1, (1,)),
    ] * 2  # fmt: skip


def test_tokens_are_one_and_the_shares_of_the_nodes() -> None:
    curve = AcceptanceCurve(FRESH)
    assert curve.shares == [0.5, 0.25, 0.25]
    assert [curve.expected(nodes) for nodes in (1, 2, 3, 9)] == [(1.5, 1), (1.75, 2), (2.0, 3), (2.0, 3)]
    with pytest.raises(ValueError, match="no step had a fresh draft"):
        AcceptanceCurve([DraftStep(1, 1, ())])


def test_smaller_trees_resample_more_often() -> None:
    """Every second tree of two nodes brings 3 tokens, and nothing is left to resample. Those of one node bring 2.

    A resampled tree has half of the nodes of a fresh one, rounded up.
    """
    curve = AcceptanceCurve([DraftStep(0, 2, (1, 2)), DraftStep(0, 2, (1,)), DraftStep(2, 2, (1, 2))])
    assert curve.expected(2) == pytest.approx(((2.5 + 0.5 * 2) / 1.5, (2 + 0.5) / 1.5))
    assert curve.expected(1) == (2.0, 1.0)


def test_break_even_by_hand() -> None:
    """A plain step takes 10 ms, a step of four nodes 10 + 4 + 2: it must bring 1.6 tokens, 0.15 for each node."""
    found = advise(AcceptanceCurve([DraftStep(0, 4, (1, 2)), DraftStep(0, 4, ())]), times(row_ms=1.0), 1, 4)
    assert found.least_tokens == pytest.approx(1.6)
    assert found.least_accepted == pytest.approx(0.15)
    assert (found.tokens, found.accepted) == (2.0, 0.25)
    assert found.gain == pytest.approx(2.0 / 1.6)
    at_break_even = AcceptanceCurve([DraftStep(0, 4, (1, 2)) for _ in range(3)] + [DraftStep(0, 4, ())] * 7)
    assert advise(at_break_even, times(row_ms=1.0), 1, 4).gain == pytest.approx(1.0)


def test_gains_fall_with_the_cost_of_rows_and_trees_shrink() -> None:
    curve = AcceptanceCurve(FRESH)
    found = [best(curve, times(row_ms), 1, 3) for row_ms in (0.0, 1.0, 4.0, 16.0)]
    assert [each.nodes for each in found] == [3, 3, 1, 1]
    gains = [each.gain for each in found]
    assert gains == sorted(gains, reverse=True)
    assert (found[0].to_json()["pays"], found[-1].to_json()["pays"]) == (True, False)
    alone, together = (best(curve, times(2.0, batch), batch, 3) for batch in (1, 4))
    assert (alone.nodes, together.nodes) == (3, 1)
    assert alone.gain > together.gain


def test_calls_in_decoding_correct_the_curve() -> None:
    """Each verification takes twice as long in decoding; a step's other time grows with its nodes."""
    curve = CostCurve((0.0, 4.0, 6.0, 8.0))
    found = step_times(curve, {0: StepMs(8.0, 0.5, 0), 1: StepMs(12.0, 1.0, 1), 2: StepMs(16.0, 3.0, 2)})
    assert found.step_ms(2, drafted=1.5) == pytest.approx(14.0 + 3.0)
    assert [at(found.aside_ms, nodes) for nodes in (0, 1, 2)] == [0.5, 1.0, 3.0]
    assert at({0: 1.0, 2: 4.0, 6: 8.0}, nodes=4) == 6.0


def test_tables_and_the_picture(tmp_path: Path) -> None:
    curve = AcceptanceCurve(FRESH)
    methods = {"own": {"batches": {str(batch): best(curve, times(4.0, batch), batch, 3).to_json() for batch in (1, 4)}}}
    assert table(methods)[1:] == [
        ["own", "1", "1", "1.50", "1.60", "50 %", "60 %", "0.94", "none"],
        ["own", "4", "1", "1.50", "2.80", "50 %", "180 %", "0.54", "none"],
    ]
    checked = {"nodes": 3, "predicted": 1.5, "measured": 1.25, "measured_interval": None, "difference": 0.2}
    assert check_table({"own": {"2": checked}})[1:] == [["own", "2", "3", "1.50", "1.25", "-", "+20.0 %"]]
    pictures = Pictures(tmp_path, "a title", ["svg"])
    draw(methods, pictures, "gain")
    assert [path.name for path in tmp_path.iterdir()] == ["gain.svg"]
    drawn = (tmp_path / "gain.svg").read_text("utf-8")
    assert "own, break-even" in drawn


def test_the_gain_in_a_batch_is_that_of_whole_texts_with_its_steps() -> None:
    """Forty steps of 2 ms, and twelve of 3 ms. Sums of both texts, no mean of their ratios."""
    texts = [tuple(range(30)), tuple(range(12))]
    runs = [
        make_run(
            number, none=make_generation(steps=len(text) - 1, tokens=text), own=make_generation(steps=6, tokens=text)
        )
        for number, text in enumerate(texts)
    ]
    found = in_batches(runs, "own", {PLAIN: StepMs(1.5, 0.5, 0.0), "own": StepMs(2.0, 1.0, 4.0)})
    assert found.ratio == pytest.approx(40 * 2 / (12 * 3))


def test_a_machine_that_is_slow_for_one_turn_moves_no_ratio() -> None:
    """In the second turn all steps take five times as long. A step with trees takes two, two and four plain ones."""
    turns = [
        {PLAIN: StepMs(3 * slow, slow, 0), "own": StepMs(3 * slow * ratio, slow * ratio, nodes)}
        for slow, ratio, nodes in ((1.0, 2, 4), (5.0, 2, 4), (1.2, 4, 1))
    ]
    assert typical(turns) == {PLAIN: pytest.approx((3.6, 1.2, 0)), "own": pytest.approx((7.2, 2.4, 3))}


def test_prompts_are_decoded_so_many_times_and_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 12.0, 24.0])
    monkeypatch.setattr(advice_runs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(advice_runs, "compare", lambda runtime, prompts, *rest: [*prompts])
    prompts, settings = [make_run().prompt], Settings(SamplingParams())
    assert advice_runs.repeated(None, prompts, {}, settings, 3, print) == prompts * 6  # type: ignore[arg-type]
