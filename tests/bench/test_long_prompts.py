"""Long prompts beside running requests: times by a fake clock, shared rows, and errors."""

from __future__ import annotations

import threading
import time

import pytest
from tests.runtime.fakes import FakeEngine, engine_of, greedy, know_costs, make_runtime

from redraft.bench.compare import Settings
from redraft.bench.long_prompts import (
    ANSWER,
    REPEATS,
    Beside,
    Repeat,
    check_context,
    long_prompt,
    measure,
    summarise,
    table,
    warnings,
)
from redraft.errors import UsageError
from redraft.runtime import RequestError, Runtime

CALL, ROW = 0.01, 0.001
"""Seconds of an engine's call and of each of its rows by the fake clock."""
PROMPTS = [list(f"prompt {number} says: ".encode() * (3 + number)) for number in range(4)]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only engine calls move, by the call and its rows."""
    now, lock = [100.0], threading.Lock()

    def advance(self: FakeEngine) -> None:
        with lock:
            now[0] += CALL + ROW * self.rows[-1]

    know_costs(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(FakeEngine, "fail", advance)


def measured(runtime: Runtime, outputs: int = 6) -> dict[str, list[Repeat]]:
    runtime.generate(PROMPTS, greedy(2), "none")
    return measure(runtime, PROMPTS, [], Settings(greedy(outputs)), 96)


def test_times_are_those_of_the_engines_calls(ticking: None) -> None:
    """A prompt of 96 tokens takes one chunk of 95 rows and a step. Of a hit, 48 rows are there."""
    with make_runtime(max_model_len=400, max_num_seqs=3) as runtime:
        repeats = measured(runtime)["none"]
    assert len(repeats) == REPEATS
    for one in repeats:
        step = CALL + ROW
        assert one.alone == pytest.approx(CALL + 95 * ROW + step)
        assert one.miss == pytest.approx(CALL + 63 * ROW + step)
        assert one.hit == pytest.approx(CALL + 15 * ROW + step)
        assert (one.cached, one.shared, one.same_text) == (48, 48, True)
        full, quiet = CALL + 3 * ROW, CALL + 2 * ROW
        assert one.rate == pytest.approx(3 / full)
        assert one.between == pytest.approx([full] * len(one.between))
        assert len(one.between) >= 3 * 6
        assert one.beside is not None
        assert one.beside.quiet == pytest.approx([quiet] * len(one.beside.quiet))
        assert max(one.beside.busy) > 1.5 * quiet, "no gap has a chunk"
        assert one.beside.first_token > one.alone


def test_gaps_are_those_while_the_prompt_waits(ticking: None) -> None:
    """All time until the first token, in which each of two requests has one output after the other."""
    with make_runtime(max_model_len=400, max_num_seqs=3) as runtime:
        for one in measured(runtime)["none"]:
            assert one.beside is not None
            assert sum(one.beside.busy) / 2 == pytest.approx(one.beside.first_token, abs=2 * (CALL + 3 * ROW))


def test_a_batch_of_one_has_no_others() -> None:
    with make_runtime(max_model_len=400) as runtime:
        repeats = measured(runtime)
    assert {one.beside for one in repeats["none"]} == {None}
    found = summarise(repeats)
    assert "gap_ratio" not in found["none"]
    assert found["none"]["cached_tokens"] == 48
    assert table({"1": found})[1][5:7] == ["-", "-"]


def test_methods_take_turns_and_have_the_texts_of_their_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)
    lines: list[str] = []
    with make_runtime(max_model_len=400, max_num_seqs=2) as runtime:
        runtime.generate(PROMPTS, greedy(2), ["none", "ngram"] * 2)
        found = measure(runtime, PROMPTS, ["ngram"], Settings(greedy(6, temperature=0.8)), 96, lines.append)
    turns = [line.rpartition(" ")[2] for line in lines if "warming" not in line]
    assert turns == ["none", "ngram", "ngram", "none"] * (REPEATS // 2)
    figures = summarise(found)
    assert [figures[method]["differing_hits"] for method in figures] == [0, 0]
    assert [figures[method]["cached_tokens"] for method in figures] == [48, 48]


def test_prompts_join_in_a_circle() -> None:
    assert long_prompt([[1, 2], [3], [4, 5]], 5, 1) == [3, 4, 5, 1, 2]
    assert long_prompt([[1, 2], [3], [4, 5]], 3, 5) == [4, 5, 1]
    with pytest.raises(UsageError, match="needs 6 tokens, and the prompts have 5 together"):
        long_prompt([[1, 2], [3], [4, 5]], 6, 0)


def test_a_prompt_and_its_answer_need_the_context() -> None:
    check_context(100, 100 + ANSWER)
    with pytest.raises(UsageError, match="give at most 99,"):
        check_context(100, 99 + ANSWER)


def test_running_requests_that_fill_the_context_are_an_error() -> None:
    with (
        make_runtime(max_model_len=160, max_num_seqs=2) as runtime,
        pytest.raises(UsageError, match="has filled the context; give a smaller --long-prompts or --max-new-tokens"),
    ):
        measured(runtime, 150)


def test_a_running_request_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    know_costs(monkeypatch)
    with make_runtime(max_model_len=400, max_num_seqs=2) as runtime:
        runtime.generate(PROMPTS, greedy(2), "none")
        engine = engine_of(runtime.verifier)
        engine.fail = lambda: 1 / 0 if engine.sizes[-1][0] == 2 else None  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="division"):
            measure(runtime, PROMPTS, [], Settings(greedy(6)), 96)


def repeat(scale: float, hit: float = 0.1, **changes: object) -> Repeat:
    beside = Beside([0.01 * scale] * 9, [0.02 * scale] * 9, 1.5 * scale)
    values = {
        "alone": scale, "hit": hit * scale, "miss": scale, "cached": 48, "shared": 48, "same_text": True,
        "rate": 100 / scale, "between": [0.02] * 9, "beside": beside,
    }  # fmt: skip
    return Repeat(**{**values, **changes})


def test_figures_are_medians_of_paired_ratios() -> None:
    """Slow repeats change times, not ratios."""
    scales = (1, 9, 2, 3, 1, 1)
    found = summarise({"none": [repeat(scale, hit) for hit, scale in enumerate(scales, 1)]})["none"]
    assert (found["gap_ratio"], found["prompt_ratio"]) == (2, 1.5)
    assert found["prompt_ratio_interval"] == (1.5, 1.5)
    assert (found["hit_ratio"], found["hit_ratio_interval"]) == (3.5, (1, 6))
    assert (found["prompt_alone_ms"], found["prompt_beside_ms"]) == (1500, 2250)
    assert found["quiet_ms"] == pytest.approx({"p50": 15, "p99": 15})
    rows = table({"1": summarise({"none": [repeat(2)]}), "4": summarise({"none": [repeat(1)] * 6})})
    assert rows[2] == ["4", "none", "100.0", "2.00", "10 / 10", "20 / 20", "2.00 (2.00 to 2.00)", "1000", "1500",
                       "1.50 (1.50 to 1.50)", "100", "1000", "0.10 (0.10 to 0.10)"]  # fmt: skip
    assert rows[1][3] == "1.00"
    assert not warnings("4", "none", found)


def test_missed_rows_and_differing_texts_are_named() -> None:
    found = summarise({"ngram": [repeat(1), repeat(1, cached=32, same_text=False)]})
    assert warnings("4", "ngram", found["ngram"]) == [
        "batch 4, ngram: a hit found 32 of 48 shared tokens", "DIFFERENT: batch 4, ngram: 1 of 2 hits",
    ]  # fmt: skip
