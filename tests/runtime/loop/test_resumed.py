"""Requests that go on after tokens which an equal one had, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.loop.scheduler import RequestOutput
from redraft.runtime.text.tokenizer import Detokenizer
from tests.runtime.fakes import greedy, make_runtime

PROMPT = [97, 98, 99, 97, 98]
WAYS = {
    "greedy": greedy(24),
    "sampled": SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=24, temperature=0.7, seed=6, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2,
        ignore_eos=True,
    ),
    "min_tokens": SamplingParams(max_tokens=24, min_tokens=12),
    "logprobs": SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True),
    "regex": SamplingParams(max_tokens=24, regex="[a-e]{3}(bc|de)*", seed=3, temperature=1.0),
}  # fmt: skip


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime(max_model_len=200, max_num_seqs=2) as found:
        yield found


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_resumed_text_is_that_of_a_request_that_was_not_interrupted(
    runtime: Runtime, params: SamplingParams, method: str
) -> None:
    whole = runtime.submit(PROMPT, params, method).result()
    assert len(whole.token_ids) > 4
    for count in (1, 2, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        runtime.forget_prefixes()
        new: list[RequestOutput] = []
        written = whole.token_ids[:count]
        found = runtime.submit(PROMPT, params, method, written=written, on_output=new.append).result()
        assert sum([output.token_ids for output in new], written) == whole.token_ids
        assert (found.text, found.token_ids, found.prompt_tokens) == (whole.text, whole.token_ids, len(PROMPT))
        assert found.finish_reason == whole.finish_reason
        if whole.logprobs is not None:
            assert found.logprobs == whole.logprobs[count:]


def test_a_stop_string_may_begin_before_the_interruption(runtime: Runtime) -> None:
    whole = runtime.submit(PROMPT, greedy(40), "none").result()
    stop = whole.text[18:22]
    params = SamplingParams(max_tokens=40, stop=(stop,), ignore_eos=True)
    stopped = runtime.submit(PROMPT, params, "none").result()
    end = len(stopped.token_ids)
    for count in range(max(end - 4, 1), end):
        sent = Detokenizer(runtime.tokenizer, PROMPT, params.stop)
        for token in stopped.token_ids[:count]:
            sent.push(token)
        resumed = runtime.submit(PROMPT, params, "ngram", written=stopped.token_ids[:count])
        assert sent.take() + "".join(resumed) == stopped.text
        assert resumed.generation.text == stopped.text


def test_a_prediction_goes_on_where_the_text_is(runtime: Runtime) -> None:
    whole = runtime.submit(PROMPT, greedy(60), "none").result()
    how = SpeculationParams("ngram", prediction=list(whole.token_ids))
    resumed = runtime.submit(PROMPT, greedy(60), how, written=whole.token_ids[:30])
    assert resumed.result().token_ids == whole.token_ids
    assert resumed.request.counters.steps < 30


@pytest.mark.parametrize("written", [[300], [-1]])
def test_tokens_that_the_model_has_not_are_refused(runtime: Runtime, written: list[int]) -> None:
    with pytest.raises(UsageError, match="the written text has token ids"):
        runtime.submit(PROMPT, greedy(5), written=written)


def test_a_text_that_has_ended_is_not_resumed(runtime: Runtime) -> None:
    whole = runtime.submit(PROMPT, greedy(5), "none").result()
    with pytest.raises(UsageError, match="ends with the written token 5"):
        runtime.submit(PROMPT, greedy(5), "none", written=whole.token_ids)
    assert runtime.submit(PROMPT, greedy(6), "none", written=whole.token_ids).result().token_ids[:5] == whole.token_ids
