"""Figures of traces worked by hand: acceptance by depth, accepted tokens by position, estimates."""

from __future__ import annotations

import json
from math import log
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.bench.compare import Settings
from redraft.bench.report_traces import by_depth, by_position, depths, estimates
from redraft.runtime import SamplingParams


def test_acceptance_and_misaligned_tokens_by_depth_worked_by_hand() -> None:
    """Two drafts in the text 10 11 12 …: one is right, wrong, right by chance; the other is right and ends."""
    text = [9, 10, 11, 12, 13, 14]
    lines = [
        json.dumps({"request": 0, "prompt": [9], "first": 10}),
        json.dumps({"position": 1, "tokens": [10, 11, 99, 13]}),
        json.dumps({"table_ms": []}),
        json.dumps({"position": 2, "tokens": [11, 12]}),
    ]
    found = by_depth(lines, [text])
    assert found["drafts"][:4] == [2, 1, 1, 0]
    assert found["conditional"] == [1.0, 0.0]
    assert found["misaligned"] == [0.0, 1.0, 0.0]


def test_drafts_beyond_the_end_of_the_text_do_not_count() -> None:
    lines = [json.dumps({"prompt": [9], "first": 10}), json.dumps({"position": 1, "tokens": [10, 11, 12]})]
    assert by_depth(lines, [[9, 10, 11]])["drafts"][:2] == [1, 0]


def test_a_text_that_ends_without_a_step_is_no_other_ones_text() -> None:
    """The first prompt's output is one token, and no line. The second's draft is right."""
    written = {(1,): ([7], []), (2,): ([8, 9], [{"prompt": [2], "first": 8}, {"position": 1, "tokens": [8, 9]}])}

    def generate(prompts: list[list[int]], *_: object, trace: Any) -> list[Any]:
        tokens, lines = written[tuple(prompts[0])]
        trace.write("".join(json.dumps(one) + "\n" for one in lines))
        return [SimpleNamespace(token_ids=tokens)]

    runs: Any = [SimpleNamespace(token_ids=list(prompt), loops=False) for prompt in written]
    engines: Any = SimpleNamespace(generate=generate)
    found = depths(engines, runs, ["m"], Settings(SamplingParams()), lambda text: None)
    assert found["m"]["conditional"] == [1.0]


def line(position: int, committed: list[int], accepted: int) -> str:
    return json.dumps({"position": position, "committed": committed, "path": list(range(1, accepted + 1))})


def test_accepted_tokens_by_position_worked_by_hand() -> None:
    """After prompts of 3 and 1 tokens, last tokens are at 2, 15, 16, and at 1. The output's first is at 0."""
    first = [json.dumps({"prompt": [7, 8, 9], "first": 1}), line(3, [2, 3], 1), line(5, [4] * 13, 12), line(18, [5], 0)]
    second = [json.dumps({"prompt": [7], "first": 1}), json.dumps({"table_ms": []}), line(1, [2], 0)]
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
    trace = [json.dumps({"request": 0, "prompt": [4], "first": 5, "table_ms": [1.0] * 8}), json.dumps(step)]
    assert estimates([trace]) == {"predicted": pytest.approx(1.75), "measured": 2.0, "steps": 1}
    assert estimates([trace, trace])["measured"] == 2.0  # type: ignore[index]
    del step["choice"]
    assert estimates([[trace[0], json.dumps(step)]]) is None
