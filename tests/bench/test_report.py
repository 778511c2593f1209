"""A report's figures worked by hand: speeds, differences, stages, traces, costs and sizes."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.bench.runs import LOOP, TOKENS, make_generation, make_run

from redraft.bench import report
from redraft.bench.compare import Run, Settings
from redraft.bench.report import Study, by_depth, by_position, compared, estimates
from redraft.bench.report_costs import drafter_sizes, matrix_products, training_of
from redraft.errors import UsageError
from redraft.runtime import Budget, SamplingParams, SpeculationParams

METHODS = ["first", "second"]


def run(number: int, accepted: tuple[int, int], rates: tuple[float, float], tokens: tuple[int, ...] = TOKENS) -> Run:
    """Two methods, which accept so many tokens in six steps."""
    first, second = (
        make_generation(rate, 6, 12, count, tokens, draft_ms=1.0, verify_ms=1.0)
        for rate, count in zip(rates, accepted, strict=True)
    )
    return make_run(number, none=make_generation(tokens=tokens), first=first, second=second)


def test_differences_are_of_the_same_prompts() -> None:
    """τ is 1 + 12 / 6 and 1 + 6 / 6; prompts differ much, the two methods always by one token a step."""
    runs = [run(n, (6 + n, 12 + n), (100 + n, 200 + 2 * n)) for n in range(8)]
    (pair,) = compared(runs, METHODS, None)["pairs"]
    assert pair == {
        "method": "second", "than": "first", "tau": pytest.approx(1), "tau_interval": pytest.approx((1, 1)),
        "speed": pytest.approx(2), "speed_interval": pytest.approx((2, 2)), "separate": True,
    }  # fmt: skip
    by_turns = [run(n, *(((12, 6), (200, 100)) if n % 2 else ((6, 12), (100, 200)))) for n in range(8)]
    (pair,) = compared(by_turns, METHODS, None)["pairs"]
    assert (pair["tau"], pair["separate"]) == (pytest.approx(0), False)


def test_speed_is_of_the_time_of_a_token_and_loops_take_no_part() -> None:
    """One and a half times plain decoding's rate, τ of 1 + 6 / 6, each of eight prompts."""
    looping = run(9, (60, 0), (900, 1), LOOP)
    figures = compared([looping, *(run(n, (6, 6), (150, 150)) for n in range(8))], METHODS, None)
    speed = {"speed": pytest.approx(1.5), "interval": pytest.approx((1.5, 1.5)), "prompts": 8}
    assert figures["speeds"]["first"] == {"all": speed, "a": speed}
    tau = {"tau": 2.0, "interval": (2.0, 2.0), "prompts": 8}
    assert figures["tokens_a_step"]["second"] == {"all": tau, "a": tau}
    assert figures["against"] == {}
    nothing = compared([looping], METHODS, None)
    assert (nothing["speeds"], nothing["pairs"]) == ({"first": {}, "second": {}}, [])


def test_turns_of_a_conversation_are_one_prompt() -> None:
    figures = compared([run(1, (6, 6), (150, 150)) for _ in range(8)], METHODS, None)
    assert figures["speeds"]["first"]["all"] == {"speed": pytest.approx(1.5), "interval": None, "prompts": 1}


def test_speed_and_tokens_over_a_baseline_and_stages_over_steps() -> None:
    """τ is 1 + 6 / 6 and 1 + 12 / 6; the second is twice as fast as the first. Six steps draft for a millisecond."""
    figures = compared([run(n, (6, 12), (100 + n, 200 + 2 * n)) for n in range(8)], METHODS, "first")
    assert figures["against"]["first"]["all"]["speed"] == 1
    assert figures["against"]["second"]["a"] == {
        "tau": 3.0, "interval": (3.0, 3.0), "speed": pytest.approx(2), "speed_interval": pytest.approx((2, 2)),
    }  # fmt: skip
    assert list(figures["stages"]) == ["none", *METHODS]
    assert figures["stages"]["first"] == pytest.approx({"draft": 1 / 6, "resample": 0, "verify": 1 / 6, "host": 0})


@pytest.mark.parametrize("with_chains", [False, True])
def test_figures_by_depth_are_of_the_chains(monkeypatch: pytest.MonkeyPatch, with_chains: bool) -> None:
    """Speeds are of the measured engines, depths of the engines for chains; a drafter that these lack has none."""
    engines: Any = SimpleNamespace(methods=("none", *METHODS))
    chains: Any = SimpleNamespace(methods=("none", "second"))
    traced: dict[bool, Any] = {}

    def trace(runtime: Any, ids: Any, params: Any, how: SpeculationParams) -> tuple[list[str], list[int]]:
        traced[how.budget == Budget(5, 5, 1)] = runtime
        return [], []

    monkeypatch.setattr(report, "compare", lambda runtime, *given: [run(1, (6, 6), (150, 150))])
    monkeypatch.setattr(report, "trace", trace)
    monkeypatch.setattr(report, "costs", lambda *given: {})
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(drafters={}))
    study = Study(engines, bundle, [], METHODS, Settings(SamplingParams()), chains if with_chains else None)
    found = study.measure(lambda line: None)
    assert traced == {True: chains if with_chains else engines, False: engines}
    assert list(found["depths"]) == (["second"] if with_chains else METHODS)
    assert (list(found["positions"]), found["estimates"]) == (METHODS, dict.fromkeys(METHODS))


def test_a_baseline_is_one_of_the_methods() -> None:
    engines: Any = SimpleNamespace(methods=("none", "first"))
    study = Study(engines, engines, [], ["first"], Settings(SamplingParams()), baseline="other")
    with pytest.raises(UsageError, match="'other' is not among the methods"):
        study.measure(lambda line: None)


def test_acceptance_and_misaligned_tokens_by_depth_worked_by_hand() -> None:
    """Two drafts in the text 10 11 12 …: one is right, wrong, right by chance; the other is right and ends.

    Another text has no line, since it ends with its first token. The third's draft goes beyond its end.
    """
    lines = [
        json.dumps({"request": 0, "prompt": [9], "first": 10}),
        json.dumps({"position": 1, "tokens": [10, 11, 99, 13]}),
        json.dumps({"table_ms": []}),
        json.dumps({"position": 2, "tokens": [11, 12]}),
    ]
    found = by_depth([(lines, [9, 10, 11, 12, 13, 14]), ([], [9, 10])])
    assert found["drafts"][:4] == [2, 1, 1, 0]
    assert found["conditional"] == [1.0, 0.0]
    assert found["misaligned"] == [0.0, 1.0, 0.0]
    assert by_depth([([json.dumps({"position": 1, "tokens": [10, 11, 12]})], [9, 10, 11])])["drafts"][:2] == [1, 0]


def line(position: int, committed: list[int], accepted: int) -> str:
    return json.dumps({"position": position, "committed": committed, "path": list(range(1, accepted + 1))})


def test_accepted_tokens_by_position_worked_by_hand() -> None:
    """After prompts of 3 and 1 tokens, last tokens are at 2, 15, 16, and at 1. The output's first is at 0."""
    first = [json.dumps({"prompt": [7, 8, 9]}), line(3, [2, 3], 1), line(5, [4] * 13, 12), line(18, [5], 0)]
    second = [json.dumps({"prompt": [7]}), json.dumps({"table_ms": []}), line(1, [2], 0)]
    assert by_position([first, second]) == [
        {"position": 8, "accepted": pytest.approx(13 / 3), "blocks": 3},
        {"position": 24, "accepted": 0, "blocks": 1},
    ]


def test_estimates_of_the_controller_against_the_outcome() -> None:
    """Shares of 1/2 and 1/4 promise 1.75 tokens; the chain's first node is accepted, so that two come."""
    logs = [0.0, log(0.5), log(0.25)]
    choice = {"rate": 0.0, "gains": {"fresh": 1.0}, "tried": False, "log_probs": logs, "looked_up": []}
    step = {"request": 0, "position": 1, "source": "fresh", "tokens": [5, 6, 7], "parents": [-1, 0, 1],
            "log_probs": logs, "said": [6, 9, -1], "path": [1], "committed": [6, 9], "choice": choice}  # fmt: skip
    trace = [json.dumps({"request": 0, "prompt": [4, 5], "table_ms": [1.0] * 8}), json.dumps(step)]
    assert estimates([trace]) == {"predicted": pytest.approx(1.75), "measured": 2.0, "steps": 1}
    assert estimates([trace, trace])["measured"] == 2.0  # type: ignore[index]
    del step["choice"]
    assert estimates([[trace[0], json.dumps(step)]]) is None


def test_products_are_those_of_every_use_of_a_matrix(tmp_path: Path) -> None:
    """A matrix of 4 × 3 is used twice, one of 3 × 2 in 8 bits once, and a product of two inputs has no weights."""
    weights = onnx.numpy_helper.from_array(np.zeros((4, 3), np.float32), "w")
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
        onnx.helper.make_node("MatMul", ["y", "w"], ["b"]),
        onnx.helper.make_node("MatMul", ["a", "b"], ["c"]),
        onnx.helper.make_node("MatMulNBits", ["c", "q", "s"], ["d"], domain="com.microsoft", K=3, N=2),
    ]
    path = tmp_path / "graph.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], [], [weights])), path)
    assert matrix_products(path) == 2 * 12 + 6


def test_training_of_a_drafter_is_of_the_folder_that_it_was_built_from(tmp_path: Path) -> None:
    """A recipe's drafter has the recipe's folder."""
    training = {"step": 7, "spent": {"tokens": 800, "seconds": 9.0}}
    (tmp_path / "config.json").write_text(json.dumps({"training": training}))
    options = ("--drafter", f"one={tmp_path},width=1", "--drafter", "two=gone")
    manifest: Any = SimpleNamespace(name="other", options=options)
    assert training_of(manifest, "one") == {"steps": 7, "tokens": 800, "seconds": 9.0}
    assert training_of(manifest, "two") is training_of(manifest, "three") is None
    recipe: Any = SimpleNamespace(name="smollm2-135m", options=("--drafter", "all"))
    expected = {"steps": 400, "tokens": 432_580, "seconds": pytest.approx(882.7, abs=0.1)}
    assert training_of(recipe, "hass-long") == expected


def test_bytes_are_of_all_files_of_a_drafter_and_of_no_other_ones(tmp_path: Path) -> None:
    """Steering has a file of its own. A reference that two graphs share counts once."""
    files = [("a.data", 0, 100), ("a.data", 0, 100), ("a.steer.data", 0, 20), ("a-long.data", 0, 1000)]
    record: Any = SimpleNamespace(
        method="m", hidden_states=(), graphs={}, limits=SimpleNamespace(nodes=1, depth=1),
        weights=[SimpleNamespace(file=file, offset=offset, length=length) for file, offset, length in files],
    )  # fmt: skip
    bundle: Any = SimpleNamespace(
        path=tmp_path, manifest=SimpleNamespace(name="other", options=(), drafters={"a": record})
    )
    assert drafter_sizes(bundle, ["a"])["a"]["bytes"] == 120
