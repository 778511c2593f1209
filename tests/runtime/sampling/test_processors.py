"""Each processor against the definition of its parameter, and states that no later token changes."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import DataError, UsageError
from redraft.runtime import SamplingParams
from redraft.runtime.sampling.processors import Functions, make_processors

PROMPT, ANSWER = [5, 3, 5], [2, 3, 2, 2]
LOGITS = np.array([1, -1, 2, -2, 3, 4, -3, 0.5], np.float32)


def processed(stop_tokens: tuple[int, ...] = (), answer: list[int] = ANSWER, **values: object) -> list[float]:
    """Return logits after the processors of some parameters."""
    row = LOGITS.copy()
    for processor in make_processors(SamplingParams(**values), stop_tokens):
        state = processor.begin(PROMPT)
        for token in answer:
            state = processor.advance(state, token)
        row = processor.process(state, row)
    return row.tolist()


def changed(**values: float) -> list[float]:
    """Return LOGITS with other values, by token `t0` to `t7`."""
    return [values.get(f"t{token}", value) for token, value in enumerate(LOGITS.tolist())]


def test_parameters_that_change_nothing_have_no_processor() -> None:
    assert make_processors(SamplingParams(temperature=0.5, top_k=3, min_tokens=5), ()) == []


def test_bias_and_banned_tokens() -> None:
    expected = changed(t0=-1, t4=4.5, t6=-np.inf)
    assert processed(logit_bias={4: 1.5, 0: -2.0}, banned_tokens=(6,)) == expected


def test_a_banned_token_stays_banned_whatever_its_bias() -> None:
    assert processed(logit_bias={6: 100.0}, banned_tokens=[6]) == changed(t6=-np.inf)


@pytest.mark.parametrize(("count", "ends"), [(4, True), (5, False)])
def test_minimum_tokens(count: int, ends: bool) -> None:
    assert processed((1, 7), min_tokens=count) == (LOGITS.tolist() if ends else changed(t1=-np.inf, t7=-np.inf))


def test_repetition_counts_prompt_and_answer() -> None:
    assert processed(repetition_penalty=2.0) == changed(t2=1, t3=-4, t5=2)


def test_presence_and_frequency_count_the_answer() -> None:
    assert processed(presence_penalty=0.5) == changed(t2=1.5, t3=-2.5)
    assert processed(frequency_penalty=0.5) == changed(t2=0.5, t3=-2.5)


def test_all_penalties_in_order() -> None:
    found = processed(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={2: 2.0})
    assert found == changed(t2=(2 + 2) / 2 - 0.75 - 0.5, t3=-4 - 0.25 - 0.5, t5=2)


def test_functions_come_last_and_see_the_whole_path() -> None:
    seen = []

    def function(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((list(tokens), logits[5].item()))
        return logits + 1

    assert processed(logits_processors=[function, function], repetition_penalty=2.0)[5] == 4
    assert seen == [(PROMPT + ANSWER, 2.0), (PROMPT + ANSWER, 3.0)]


def test_a_state_is_not_changed_by_its_successors() -> None:
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=5, logits_processors=[lambda tokens, logits: logits]
    )
    for processor in make_processors(params, (1,)):
        state = processor.advance(processor.begin(PROMPT), 2)
        before = processor.process(state, LOGITS.copy()).tolist()
        for token in range(8):
            processor.advance(processor.advance(state, token), 2)
        assert processor.process(state, LOGITS.copy()).tolist() == before


WRONG = {
    r"returned an array of shape \(3,\), not \(8,\)": lambda tokens, logits: logits[:3],
    "returned no array of logits": lambda tokens, logits: [[1.0], []],
    "returned nothing": lambda tokens, logits: None,
    "returned complex numbers": lambda tokens, logits: logits * 1j,
    "no numbers": lambda tokens, logits: logits * np.nan,
    "raised ZeroDivisionError: division by zero": lambda tokens, logits: 1 / 0,
    "raised DataError: no file": lambda tokens, logits: fail(DataError("no file")),
}


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("message", WRONG)
def test_a_function_that_fails(message: str) -> None:
    functions = Functions([WRONG[message]])
    with pytest.raises(UsageError, match=message):
        functions.process(functions.begin(PROMPT), LOGITS.copy())


@pytest.mark.filterwarnings("error")
def test_logits_that_are_huge_in_float64_forbid() -> None:
    functions = Functions([lambda tokens, logits: np.where(np.arange(8) == 3, logits.astype(np.float64), -1e300)])
    found = functions.process(functions.begin(PROMPT), LOGITS.copy())
    assert found.dtype == np.float32
    assert np.flatnonzero(found > -np.inf).tolist() == [3]
