"""Requests that sample: bad parameters before anything is computed, and errors that end one request alone."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import Budget, RequestError, SamplingParams, SpeculationParams
from redraft.runtime.observe.trace import replay
from tests.runtime.fakes import EOS, NO_NUMBERS, VOCABULARY, engine_of, greedy, make_runtime, mixing_rule, plain, script

PROMPTS = [[97, 98, 99] * 4, [100, 101] * 5, [98, 97] * 6]
TREES = SpeculationParams("ngram", budget=Budget(12, 4, 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"temperature": "0"}, "temperature must be a number, not '0'"),
        ({"stop": ("",)}, "a stop string must not be empty"),
        ({"logits_processors": (3,)}, "logits_processors must be a list of functions"),
        ({"logits_processors": max}, "logits_processors must be a list of functions"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or above, at most 1e30, not -0.1"),
        ({"temperature": 1e39}, "temperature must be .*, not 1e"),
        ({"temperature": 10**400}, "temperature must be .*, not 1000"),
        ({"logit_bias": {1: 10**400}}, "logit_bias must map token ids to numbers"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be from 1e-30 to 1e30"),
        ({"json_schema": {"enum": [float("nan")]}}, "the JSON schema has a value that JSON lacks"),
        ({"json_schema": '{"enum": [NaN]}'}, "the JSON schema is not JSON: NaN is no number of JSON"),
        ({"temperature": float("nan")}, "temperature must be .*, not nan"),
        ({"temperature": float("inf")}, "temperature must be .*, not inf"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"min_p": 1.1}, "min_p must be from 0 to 1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"top_k": -1}, r"top_k must be 0 \(all\) or above"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-30 to 1e30"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be from -2 to 2"),
        ({"seed": -1}, r"seed must be from 0 to 2\^63 - 1, not -1"),
        ({"seed": 1 << 63}, "seed must be from 0"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens is 5 and max_tokens 4; lower min_tokens"),
        ({"min_tokens": -1}, "min_tokens must be 0 or above"),
        ({"logprobs": -1}, "logprobs must be None or a whole number from 0"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1 is nan; forbid a token with banned_tokens"),
        ({"logit_bias": {1: float("-inf")}}, "logit_bias of token 1 is -inf"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: 1e300}}, r"logit_bias of token 1 is 1e\+300, the largest is 1e\+30"),
        ({"stop": (5,)}, r"stop must be a text or a list of texts, not \(5,\)"),
        ({"stop": None}, "stop must be a text or a list of texts, not None"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"json_object": "no"}, "json_object must be True or False, not 'no'"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers, not 3"),
        ({"banned_tokens": [1.5]}, "banned_tokens's token ids are whole numbers, not 1.5"),
        ({"kept_tokens": [1.5]}, "kept_tokens's token ids are whole numbers, not 1.5"),
        ({"banned_tokens": "abc"}, "banned_tokens is a list of token ids, not str"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias has the token id 258, the model knows 0 to 257"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has the token id -1"),
        ({"banned_tokens": [5, VOCABULARY]}, "banned_tokens has the token id 258"),
        ({"banned_tokens": range(VOCABULARY)}, "banned_tokens and min_tokens leave no token to choose"),
        ({"banned_tokens": [*range(EOS)], "min_tokens": 1}, "leave no token to choose"),
        ({"logprobs": VOCABULARY + 1}, "logprobs is 259, the model has 258 tokens"),
        ({"regex": "a+", "banned_tokens": [97]}, "leave no token that can begin a text of the regular expression"),
        ({"regex": "a?", "banned_tokens": [97], "min_tokens": 1}, "leave no token that can begin a text"),
        (
            {"max_tokens": 999, "min_tokens": 200},
            "min_tokens is 200, and after 1 tokens of the prompt the context holds",
        ),
    ],
)
def test_what_the_model_forbids_is_refused_before_anything_is_computed(values: dict[str, object], message: str) -> None:
    runtime = make_runtime()
    with pytest.raises(UsageError, match=message):
        runtime.generate([[97]], SamplingParams(**{"max_tokens": 5, **values}))
    assert engine_of(runtime.verifier).sizes == []


def test_numbers_of_numpy_are_those_of_python() -> None:
    """64-bit integers of NumPy overflow in the keys of noise."""
    values = {"seed": np.int64(5), "temperature": np.float32(0.5), "max_tokens": np.int32(9)}
    found = make_runtime().generate([[97]], SamplingParams(**values))  # type: ignore[arg-type]
    expected = make_runtime().generate([[97]], SamplingParams(seed=5, temperature=0.5, max_tokens=9))
    assert found[0].token_ids == expected[0].token_ids


def test_end_tokens_count_as_banned_only_if_they_end_the_text() -> None:
    params = greedy(3, banned_tokens=[*range(EOS)], min_tokens=1, ignore_eos=True)
    assert make_runtime().generate([[97]], params)[0].token_ids == (EOS,) * 3


def failing(length: int, error: Exception) -> SamplingParams:
    """Return parameters of a request that fails after `length` tokens, prompt included."""

    def process(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(tokens) == length:
            raise error
        return logits

    return greedy(30, logits_processors=[process])


def test_a_processors_own_array_is_not_changed() -> None:
    """A temperature divides the logits in place, which may be an array that the processor returns again."""
    row = np.linspace(0, 3, VOCABULARY, dtype=np.float32)
    row.setflags(write=False)
    params = greedy(6, temperature=0.5, logprobs=0, logits_processors=[lambda tokens, logits: row], ignore_eos=True)
    (found,) = make_runtime().generate([[97]], params)
    scores = row / 0.5
    expected = scores - np.log(np.exp(scores).sum())
    assert [one.logprob for one in found.logprobs] == pytest.approx([expected[t] for t in found.token_ids], abs=1e-4)


def test_a_processor_cannot_allow_what_is_forbidden() -> None:
    params = greedy(4, regex="ab+c", logits_processors=[lambda tokens, logits: np.eye(VOCABULARY)[EOS]])
    (found,) = make_runtime().generate([[97]], params)
    assert EOS not in found.token_ids
    params = greedy(4, banned_tokens=[5], logits_processors=[lambda tokens, logits: np.eye(VOCABULARY)[5]])
    assert 5 not in make_runtime().generate([[97]], params)[0].token_ids


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "rejection"}])
def test_logits_that_are_no_numbers_end_their_request_alone(values: dict[str, object]) -> None:
    broken = len(PROMPTS[1]) + 3
    runtime = make_runtime(
        lambda tokens: NO_NUMBERS if len(tokens) == broken and tokens[0] == PROMPTS[1][0] else mixing_rule(tokens),
        max_num_seqs=2,
    )
    with pytest.raises(RequestError, match=r"prompt 2, token 4: the model's logits are no numbers \(NaN\)") as caught:
        runtime.generate(PROMPTS[:2], greedy(12, **values), "none")
    assert [len(one.token_ids) for one in caught.value.generations] == [12, 3]


@pytest.mark.parametrize("how", ["none", TREES], ids=["none", "trees"])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 13])
def test_an_error_ends_one_request_alone(how: str | SpeculationParams, max_num_seqs: int, at: int) -> None:
    """The others have their whole texts, and the failed one its tokens before the error."""
    runtime = make_runtime(max_num_seqs=max_num_seqs)
    params = [greedy(30), failing(len(PROMPTS[1]) + at, KeyError("no")), greedy(30)]
    message = f"prompt 2, token {at + 1}: a logits processor raised KeyError: 'no'"
    with pytest.raises(RequestError, match=message) as caught:
        runtime.generate(PROMPTS, params, how)
    expected = [plain(mixing_rule, prompt, 30) for prompt in PROMPTS]
    texts = [list(one.token_ids) for one in caught.value.generations]
    assert texts == [expected[0], expected[1][:at], expected[2]]
    reasons = [one.finish_reason for one in caught.value.generations]
    assert reasons == ["length", "error", "length"]
    assert runtime.generate(PROMPTS[:1], greedy(30), how)[0].token_ids == tuple(expected[0])


def test_an_error_past_the_end_of_a_text_is_none() -> None:
    """In a tree, the node after the last token may fail where plain decoding never comes."""
    text = b"abcabcabcabc"
    runtime = make_runtime(script([*text, EOS], 1))
    params = failing(1 + len(text) + 1, ValueError("past the end"))
    prediction = SpeculationParams("ngram", prediction=[*text, EOS, 97, 98], budget=Budget(16, 16, 1))
    (found,) = runtime.generate([[97]], params, prediction)
    assert found.finish_reason == "stop"
    assert bytes(found.token_ids[:-1]) == text


def test_a_stream_raises_after_its_last_text() -> None:
    stream = make_runtime(script(b"hello there", 1)).stream([97], failing(6, ValueError("no")))
    chunks: list[str] = []
    with pytest.raises(RequestError, match="token 6: a logits processor raised ValueError: no"):
        chunks.extend(stream)
    assert "".join(chunks) == "hello"


@pytest.mark.parametrize("count", [3, 4, 9])
def test_stop_strings_and_ends_count_after_the_minimum(count: int) -> None:
    runtime = make_runtime(script(b"one two one two", 1))
    params = greedy(12, stop="two", min_tokens=count)
    text = runtime.generate([[97]], params)[0].text
    assert text == ("one " if count < 7 else "one two one ")[:12]
    ended = make_runtime(script([97, EOS, EOS, 98], 1)).generate([[97]], greedy(12, min_tokens=count))[0]
    assert len(ended.token_ids) == 12


def test_a_sampled_trace_replays() -> None:
    """Nodes that the sampler did not reach have no target token."""
    runtime, file = make_runtime(max_num_seqs=3), io.StringIO()
    params = [greedy(40, temperature=0.2, seed=seed) for seed in range(3)]
    found = runtime.generate(PROMPTS, params, TREES, trace=file)
    lines = file.getvalue().splitlines()
    assert any("-1" in line.partition('"said"')[2].partition("]")[0] for line in lines)
    played = replay(lines)
    texts = sorted(tuple(tokens) for tokens in played.requests.values())
    assert texts == sorted((*prompt, *one.token_ids) for prompt, one in zip(PROMPTS, found, strict=True))


def test_json_has_log_probabilities_if_requested() -> None:
    params = greedy(2, logprobs=1, temperature=0.5)
    values = make_runtime().generate([[97]], params)[0].to_json()["logprobs"]
    assert [set(one) for one in values] == [{"token_id", "logprob", "top"}] * 2
    assert [set(one["top"][0]) for one in values] == [{"token_id", "logprob"}] * 2
    assert "logprobs" not in make_runtime().generate([[97]], greedy(2))[0].to_json()
