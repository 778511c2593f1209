"""Constrained requests: every text matches, whatever drafts it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import SamplingParams, SpeculationParams
from redraft.types import Budget
from tests.runtime.fakes import make_runtime, script

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "colour"],
    "additionalProperties": False,
}
WISHES = b'{"name": "Ada", "color": "green"}'


def constrained(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 300, "json_schema": PERSON, **values})


@pytest.mark.parametrize(
    ("temperature", "budget"), [(0.0, None), (1.0, Budget(6, 6, 1)), (1.0, Budget(6, 3, 3))], ids=str
)
def test_speculation_changes_no_token(temperature: float, budget: Budget | None) -> None:
    runtime = make_runtime(script(WISHES, 2), 400, max_num_seqs=2)
    params = [constrained(temperature=temperature, seed=seed) for seed in range(4)]
    prompts = ["ab"] * len(params)
    plain = runtime.generate(prompts, params, "none")
    drafted = runtime.generate(prompts, params, SpeculationParams("ngram", budget=budget))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert len({one.token_ids for one in plain}) == (1 if temperature == 0 else 4)
    for one in plain:
        assert list(json.loads(one.text)) == ["name", "colour"]
        assert json.loads(one.text)["colour"] in ("red", "green")
        assert one.finish_reason == "stop"


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_texts_by_rejection_follow_the_schema(acceptance: str) -> None:
    runtime = make_runtime(script(WISHES, 2), 400)
    params = [constrained(temperature=1.0, seed=seed, acceptance=acceptance) for seed in range(6)]
    for one in runtime.generate(["ab"] * 6, params, SpeculationParams("ngram", budget=Budget(6, 6, 2))):
        assert json.loads(one.text)["colour"] in ("red", "green")


def test_forced_tokens_need_fewer_verifications() -> None:
    """No part of the text was there before, so n-grams find nothing."""
    runtime = make_runtime(script(b"yep", 2))
    params, pattern = SamplingParams(max_tokens=60, regex="(yes|no)@quick;(brown|red)#fox!"), "yes@quick;brown#fox!"
    drafts = SpeculationParams("ngram", budget=Budget(8, 8, 1))
    (plain,), (drafted,) = runtime.generate(["ab"], params, "none"), runtime.generate(["ab"], params, drafts)
    assert plain.text == drafted.text == pattern
    assert (
        drafted.metrics.num_accepted_draft_tokens == len(pattern) - len("y" + "b") - 2
    )  # two steps end at their bonus
    assert drafted.metrics.num_spec_steps <= 4


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"regex": "(yes|no)( really)?"}, "(yes|no)( really)?"),
        ({"grammar": 'start: "a"+ ";"'}, "a+;"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_other_constraints(values: dict[str, object], pattern: str) -> None:
    runtime = make_runtime(script(b"aa;", 2) if "grammar" in values else script(b"{}", 2))
    params = SamplingParams(max_tokens=60, **values)
    (found,) = runtime.generate(["ab"], params, "ngram")
    assert re.fullmatch(pattern, found.text)


def test_errors_come_before_generation() -> None:
    runtime = make_runtime()
    for values, problem in (
        ({"regex": "("}, "does not compile"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "does not compile"),
        ({"regex": r"[^\s\S]"}, "no text matches"),
    ):
        with pytest.raises(UsageError, match=problem):
            runtime.stream("ab", SamplingParams(**values))


def test_parameters_that_contradict() -> None:
    with pytest.raises(UsageError, match="one of regex and json_object"):
        SamplingParams(regex="a", json_object=True)
    with pytest.raises(UsageError, match="ends with an end-of-sequence token"):
        SamplingParams(regex="a", ignore_eos=True)
    with pytest.raises(UsageError, match="a regular expression is a text"):
        SamplingParams(regex=3)
    with pytest.raises(UsageError, match="a value that JSON lacks"):
        SamplingParams(json_schema={"enum": [object()]})


def test_a_request_that_cannot_go_on_fails_alone() -> None:
    """Another processor contradicts the constraint after two tokens."""

    def contradict(tokens: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        return logits if len(tokens) < 4 else np.full_like(logits, -np.inf)

    runtime = make_runtime(script(b"aaaa;", 2), max_num_seqs=2)
    wrong, right = (
        SamplingParams(max_tokens=20, grammar='start: "a"+ ";"', logits_processors=functions)
        for functions in ([contradict], [])
    )
    with pytest.raises(UsageError, match="prompt 1, token 3") as caught:
        runtime.generate(["ab", "ab"], [wrong, right], "ngram")
    assert [one.text for one in caught.value.generations] == ["aa", "aaaa;"]
