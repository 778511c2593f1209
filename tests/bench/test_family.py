"""The family's figures from generations made by hand, its table, and a comparison of one run from training on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.bench.runs import LOOP, make_generation, make_run

from redraft.bench import family
from redraft.bench.compare import Run


def run(number: int, kind: str = "a", tokens: tuple[int, ...] = tuple(range(12)), **rates: float) -> Run:
    """Plain decoding makes 100 tokens a second, and `base` and `other` with their controllers 150 and 120.

    With fixed trees, `base` has 2 tokens accepted in each of 4 steps that drafted, of 6; `other` 3 in each of 3.
    """
    made = {
        "base": make_generation(rates.get("base", 150.0), tokens=tokens),
        "other": make_generation(rates.get("other", 120.0), tokens=tokens),
        "base fixed": make_generation(90.0, 6, 20, 8, tokens=tokens, drafts=4),
        "other fixed": make_generation(80.0, 6, 18, 9, tokens=tokens, drafts=3),
        "none": make_generation(100.0, tokens=tokens),
    }
    return make_run(number, kind, **made)


def test_tau_counts_the_steps_that_drafted() -> None:
    found = family.figures([run(number) for number in range(6)], ["base", "other"])["not_looping"]
    assert (found["base"]["tau"], found["other"]["tau"]) == (3.0, 4.0)
    assert found["base"]["drafted"] == 5.0
    assert found["other"]["tau_over_base"] == {"ratio": pytest.approx(4 / 3), "interval": pytest.approx((4 / 3, 4 / 3))}
    assert found["other"]["fixed_speed"]["ratio"] == pytest.approx(0.8)
    assert [found[name]["speed"]["ratio"] for name in ("base", "other")] == pytest.approx([1.5, 1.2])
    assert found["other"]["speed_over_base"]["ratio"] == pytest.approx(0.8)


def test_loops_are_apart_and_kinds_have_figures_of_their_own() -> None:
    runs = [run(0), run(1, "b", base=50.0), run(2, tokens=LOOP, base=900.0)]
    found = family.figures(runs, ["base", "other"])
    assert (found["outputs"], found["looping_outputs"], found["differing_outputs"]) == (3, 1, 0)
    assert found["kinds"]["b"]["base"]["speed"] == {"ratio": 0.5, "interval": None}
    assert found["not_looping"]["base"]["speed"]["ratio"] == pytest.approx(0.75)  # 24 tokens in 0.32 s
    assert found["all"]["base"]["speed"]["ratio"] > found["not_looping"]["base"]["speed"]["ratio"]


def test_a_text_that_differs_is_counted() -> None:
    wrong = make_run(0, "a", **{**run(0).generations, "other": make_generation(120.0, tokens=(1,) * 12)})
    assert family.figures([wrong], ["base", "other"])["differing_outputs"] == 1


def test_a_method_that_never_drafted_has_no_figures() -> None:
    silent = {**run(0).generations, "other fixed": make_generation(80.0, 6, drafts=0)}
    found = family.figures([make_run(0, "a", **silent)], ["base", "other"])["not_looping"]
    assert found["other"].keys() == {"prompts", "fixed_speed", "speed", "speed_over_base"}
    record = {"run": "other", "name": "other", "parameters": 1, "tokens": 1, "minutes": 0,
              "chain_tokens": {"depth": 3, "mean": 1.0, "least": 1.0, "most": 1.0}}  # fmt: skip
    short = {**run(0).generations, "other": make_generation(tokens=(1,) * 4)}
    for some in ([make_run(0, "a", **silent)], [make_run(0, "a", **short)], [run(0, tokens=LOOP)]):
        measured = {"fp32": family.figures(some, ["base", "other"])}
        assert "| - |" in family.table([record], measured)


def test_the_table_says_what_each_method_was_given() -> None:
    records = [
        {"name": name, "run": f"{name} at 0.001", "parameters": 1_840_000, "tokens": 327_680, "minutes": 2.5,
         "chain_tokens": {"depth": 3, "mean": 3.0, "least": 2.9, "most": 3.1}}
        for name in ("base", "other")
    ]  # fmt: skip
    found = family.figures([run(number, "ab"[number % 2]) for number in range(6)], ["base", "other"])
    head, _, base, other = family.table(records, {"fp32": found}).splitlines()
    assert "parameters | tokens | minutes" in head
    assert base.startswith(
        "| base at 0.001 | 1.84 M | 0.33 M | 2.5 | 3.000 (2.900 to 3.100) | 3.00 | 1.00 (1.00 to 1.00)"
    )
    assert "| 4.00 | 1.33 (1.33 to 1.33) | 1.20 (1.20 to 1.20) | 1.20 a |" in other


SCHEDULE = """
steps = 2
batch_tokens = 256
seq_len = 64
decay_seq_len = 64
optimizer = "scaled_adam"
lr = 1e-3
evaluate_every = 2
held_out_every = 2

[self_text]
rows = 12
prompt_tokens = 16
new_tokens = 16
temperatures = [0.0]
text = 0.8
greedy = 0.2
sampled = 0.0
held_out_rows = 2
"""
COMPARISON = """
schedule = "SCHEDULE"
seeds = [0]
rates = [1e-3, 3e-3]

[runs.eagle]
method = "eagle"
decoded_by = "eagle2"
drafter = { init = "features" }
"""


@pytest.mark.slow
def test_a_family_is_trained_built_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schedule.toml").write_text(SCHEDULE)
    (tmp_path / "one.toml").write_text(COMPARISON.replace("SCHEDULE", str(tmp_path / "schedule.toml")))
    text, prompts = tmp_path / "problems.jsonl", tmp_path / "code.jsonl"
    problems = [{"question": f"What is {n} and {n}? " * 9, "answer": f"It is {2 * n}. " * 9} for n in range(60)]
    text.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    prompts.write_text("".join(json.dumps({"id": str(n), "turns": [f"def f{n}("]}) + "\n" for n in range(2)))
    options = [
        str(tmp_path / "one.toml"), "--verifier", "tiny", "--data", f"word_problems={text}",
        "--out", str(tmp_path / "out"), "--prompts", str(prompts), "--max-new-tokens", "12", "--precision", "fp32",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["family", *options])
    family.main()
    found = json.loads(capsys.readouterr().out)
    (record,) = found["runs"]
    assert record["run"] in ("eagle at 0.001", "eagle at 0.003")
    assert record["name"] == record["run"].replace(" ", "-").replace(".", "-")
    assert (record["method"], record["rate"]) == ("eagle2", float(record["run"].split()[-1]))
    assert found["measured"]["fp32"]["differing_outputs"] == 0
    assert found["measured"]["fp32"]["all"][record["name"]]["tau"] >= 1
    assert json.loads((tmp_path / "out" / "family.json").read_text()) == found
