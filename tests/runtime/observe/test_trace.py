"""Traces: a written trace replays, and the replay refuses a line that was changed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from redraft.errors import DataError, UsageError
from redraft.runtime import SpeculationParams
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.observe.trace import replay
from redraft.types import Budget, OfferKind
from tests.runtime.fakes import greedy, make_runtime, mixing_rule, plain

PROMPTS = [[97, 98, 99], [98] * 9, [99, 97, 98] * 4, [100]]
BUDGET = Budget(12, 4, 3)


def traced(
    max_num_seqs: int = 2, method: str = "ngram", budget: Budget | None = BUDGET, packed: bool = True
) -> list[str]:
    return _traced(max_num_seqs, SpeculationParams(method, budget=budget), packed).splitlines()


@cache
def _traced(max_num_seqs: int, how: SpeculationParams, packed: bool) -> str:
    """Return a trace. Time stands still: a batch's account of gains would else depend on the machine's load."""
    file, runtime = io.StringIO(), make_runtime(max_num_seqs=max_num_seqs)
    runtime.costs.packed = packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        runtime.generate(PROMPTS, greedy(25), how, trace=file)
    return file.getvalue()


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_trace_has_every_token_and_the_nodes_of_each_source(max_num_seqs: int) -> None:
    lines = traced(max_num_seqs)
    played = replay(lines)
    texts = sorted(
        tokens[: len(prompt) + 25] for prompt, tokens in zip(PROMPTS, by_prompt(played.requests), strict=True)
    )
    assert texts == sorted(prompt + plain(mixing_rule, prompt, 25) for prompt in PROMPTS)
    steps = [json.loads(line) for line in lines if "position" in line]
    assert sum(played.steps.values()) == len(steps) == len(lines) - len(PROMPTS)
    assert sum(played.nodes.values()) == sum(len(step["tokens"]) - 1 for step in steps)
    assert sum(played.accepted.values()) == sum(len(step["path"]) for step in steps) > 0
    assert set(played.steps) <= {OfferKind.LOOKUP, OfferKind.NONE}
    assert played.nodes[OfferKind.NONE] == 0


@pytest.mark.faulty_drafts
def test_a_step_that_its_controller_cannot_explain_is_traced_without_its_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request goes on without drafts, with the same text."""

    def fails(self: Adaptive, request: object) -> None:
        raise RuntimeError("explain failed")

    monkeypatch.setattr(Adaptive, "explain", fails)
    file, runtime = io.StringIO(), make_runtime()
    (found,) = runtime.generate([PROMPTS[1]], greedy(25), "ngram", trace=file)
    assert list(found.token_ids) == plain(mixing_rule, PROMPTS[1], 25)
    assert "explain failed" in str(found.drafting_error)
    steps = [json.loads(line) for line in file.getvalue().splitlines() if "position" in line]
    assert [token for step in steps for token in step["committed"]][:25] == list(found.token_ids)
    assert not any("choice" in step for step in steps)


def test_a_depth_counts_if_the_tree_reaches_it_and_all_before_were_accepted() -> None:
    """Trees of depth 2, 2 and 1: all are tried at depth 1; of those accepted there, only deeper ones at depth 2."""
    begun = {"request": 0, "prompt": [5, 7], "table_ms": [0, 1]}
    deep = {"request": 0, "position": 1, "source": "fresh", "tokens": [7, 8, 9], "parents": [-1, 0, 1],
            "log_probs": [0, -1, -2]}  # fmt: skip
    steps = [
        {**deep, "said": [8, 9, 7], "path": [1, 2], "committed": [8, 9, 7]},
        {**deep, "position": 4, "said": [1, 9, 7], "path": [], "committed": [1]},
        {**deep, "position": 5, "tokens": [1, 8], "parents": [-1, 0], "log_probs": [0, -1], "said": [8, 2],
         "path": [1], "committed": [8, 2]},
    ]  # fmt: skip
    played = replay([json.dumps(line) for line in (begun, *steps)])
    assert played.conditional_acceptance(OfferKind.FRESH) == [pytest.approx(2 / 3), 1.0]
    assert played.tried == {("fresh", 1): 3, ("fresh", 2): 1}


def by_prompt(requests: dict[int, list[int]]) -> list[list[int]]:
    return [next(t for t in requests.values() if t[: len(prompt)] == prompt) for prompt in PROMPTS]


def test_every_choice_of_an_adaptive_run_replays() -> None:
    """Replaying computes source and size again: a different gain would select another source."""
    lines = traced(budget=None)
    steps = [json.loads(line) for line in lines if "position" in line]
    weighed = [step for step in steps if "choice" in step]
    assert len(weighed) == sum(step["source"] != OfferKind.NONE for step in steps) > 0
    assert all(step["choice"]["looked_up"] == list(range(1, len(step["tokens"]))) for step in weighed)
    assert replay(lines).nodes[OfferKind.LOOKUP] > 0
    number = next(i for i, line in enumerate(lines) if len(json.loads(line).get("choice", {}).get("log_probs", [])) > 1)
    step = json.loads(lines[number])
    step["choice"]["gains"]["fresh"] = step["choice"]["gains"]["lookup"] + 1.0
    lines[number] = json.dumps(step)
    with pytest.raises(DataError, match=f"line {number + 1} .* the largest gain is that of fresh"):
        replay(lines)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_pinned_nodes_of_a_choice_replay(max_num_seqs: int) -> None:
    """They are verified at a loss, which a trace without them would not explain."""
    lines = traced(max_num_seqs, "lookahead", None)
    assert replay(lines).nodes[OfferKind.LOOKUP] > 0
    number = next(i for i, line in enumerate(lines) if '"pinned"' in line and '"probed"' not in line)
    step = json.loads(lines[number])
    assert 0 < len(step["choice"].pop("pinned")) <= step["choice"].pop("least")
    lines[number] = json.dumps(step)
    with pytest.raises(DataError, match=f"line {number + 1} .* nodes were worth verifying"):
        replay(lines)


@pytest.mark.parametrize("packed", [True, False])
def test_the_sizes_of_a_batchs_trees_replay_together(packed: bool) -> None:
    """One line has the estimates of a step's batch. Changed, they would select fewer nodes, or other trees' ones."""
    lines = traced(budget=None, packed=packed)
    replay(lines)
    steps = [json.loads(line) for line in lines]
    starts = [i for i, step in enumerate(steps) if "together" in step]
    whole = [(i, steps[i + 1 : end]) for i, end in pairwise(starts)]
    shared = next(
        i for i, some in whole
        if len({step["request"] for step in some if "position" in step}) > 1
        and any(len(step.get("tokens", [])) > 1 and "probed" not in step["choice"] for step in some)
    )  # fmt: skip
    assert steps[shared]["together"]["packed"] is packed
    for change, message in (
        ({"rate": 1e9}, "0 nodes were worth verifying"),
        ({"shares": [0.0]}, "not among those of the batch"),
    ):
        changed = list(lines)
        changed[shared] = json.dumps({"together": {**steps[shared]["together"], **change}})
        with pytest.raises(DataError, match=message):
            replay(changed)
    with pytest.raises(DataError, match="the estimates of its batch are missing"):
        replay([line for line in lines if not line.startswith('{"together"')])


def test_streaming_writes_the_same_trace() -> None:
    streamed, generated, how = io.StringIO(), io.StringIO(), SpeculationParams("ngram", budget=BUDGET)
    assert "".join(make_runtime().stream(PROMPTS[1], greedy(25), how, streamed))
    (found,) = make_runtime().generate([PROMPTS[1]], greedy(25), how, trace=generated)
    assert streamed.getvalue() == generated.getvalue() != ""
    assert sum(replay(generated.getvalue().splitlines()).steps.values()) == found.metrics.num_steps


def test_forced_acceptance_is_not_traced() -> None:
    """Its outcomes are not the verifier's."""
    with pytest.raises(UsageError, match="cannot be traced"):
        make_runtime().generate([[97]], greedy(5), synthetic_acceptance=[0.5], trace=io.StringIO())


def accepted_step(lines: list[str]) -> int:
    """Return the index of a line whose step accepted a token."""
    return next(number for number, line in enumerate(lines) if json.loads(line).get("path"))


@pytest.mark.parametrize(
    "tamper",
    [
        lambda step: step.update(path=step["path"][:-1]),
        lambda step: step.update(committed=[*step["committed"], 97]),
        lambda step: step["committed"].__setitem__(-1, step["committed"][-1] + 1),
        lambda step: step["said"].__setitem__(0, 5),
        lambda step: step["tokens"].__setitem__(step["path"][0], 5),
        lambda step: step["tokens"].__setitem__(0, 5),
        lambda step: step["parents"].__setitem__(step["path"][0], len(step["parents"])),
        lambda step: step.update(position=step["position"] + 1),
        lambda step: step.update(source="oracle"),
        lambda step: step.update(request=99),
        lambda step: step.pop("said"),
        lambda step: step.update(said=[]),
        lambda step: step.update(tokens=None),
        lambda step: step.update(request=[0]),
    ],
)
def test_a_changed_line_is_refused_by_its_number(tamper: Callable[[dict[str, Any]], object]) -> None:
    lines = traced()
    number = accepted_step(lines)
    step = json.loads(lines[number])
    tamper(step)
    lines[number] = json.dumps(step)
    with pytest.raises(DataError, match=f"^line {number + 1} of the trace: "):
        replay(lines)


@pytest.mark.parametrize("line", ["", "{", "[]", "1", "null", '"prompt"', '{"request": 0}', '{"prompt": [1]}'])
def test_a_line_that_is_no_record_is_refused(line: str) -> None:
    lines = traced()
    with pytest.raises(DataError, match=f"^line {len(lines) + 1} of the trace: "):
        replay([*lines, line])


def test_a_missing_line_is_refused_at_the_next_of_its_request() -> None:
    lines = traced(max_num_seqs=1)
    with pytest.raises(DataError, match=r"^line 3 of the trace: .*begins at \d+, expected \d+"):
        replay([*lines[:2], *lines[3:]])
    with pytest.raises(DataError, match=r"^line 1 of the trace"):
        replay(lines[1:])
