"""Generation end to end over the toy verifier: speculative text is plain text, with the same end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import Runtime, SpeculationParams
from redraft.types import Budget

from .fakes import BOS, EOS, VOCABULARY, greedy, make_runtime, mixing_rule, plain, script


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97, 102) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize(
    ("method", "max_num_seqs", "budget"),
    [
        ("none", 1, None),
        ("none", 3, None),
        ("ngram", 1, None),
        ("ngram", 3, Budget(12, 4, 4)),
        ("ngram", 1, Budget(3, 8, 1)),
        ("ngram", 3, Budget(30, 6, 6)),
    ],
    ids=str,
)
def test_speculative_text_is_the_models_own(method: str, max_num_seqs: int, budget: Budget | None) -> None:
    """An error of mask, position, cache_len, KV compaction, padding or slot fails, since the fake reads its KV rows."""
    runtime = make_runtime(max_num_seqs=max_num_seqs)
    prompts = random_prompts(8, seed=max_num_seqs)
    for max_tokens in (2, 37):
        results = runtime.generate(prompts, greedy(max_tokens), speculation=SpeculationParams(method, budget=budget))
        assert [list(r.token_ids) for r in results] == [plain(mixing_rule, prompt, max_tokens) for prompt in prompts]
        assert {r.finish_reason for r in results} == {"length"}


def test_sequences_of_different_ends_share_a_batch() -> None:
    """The last sequence moves to the slot of a finished one, and a new one begins in slot 0: rows must follow."""
    prompts = random_prompts(7, seed=5)

    def rule(tokens: list[int]) -> int:
        return EOS if len(tokens) % 37 == 0 else mixing_rule(tokens)

    results = make_runtime(rule, max_num_seqs=3).generate(prompts, greedy(60))
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain(rule, prompt, 60)
        expected = expected[: expected.index(EOS) + 1] if EOS in expected else expected
        assert list(result.token_ids) == expected


def test_speculation_saves_steps_on_repetitive_text() -> None:
    """Lossless text is not enough: a drafter that is never correct would pass every other test."""
    cycle = b"abcdefgh" * 20
    runtime = make_runtime(script(cycle, 9))
    result = runtime.generate(["abcdefgh " + ""], greedy(100))[0]
    assert bytes(result.token_ids) == cycle[:100]
    assert result.metrics.mean_acceptance_length > 3
    assert result.metrics.num_steps * result.metrics.mean_acceptance_length == pytest.approx(100)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 257])
def test_chunked_prefill(length: int) -> None:
    """At chunk borders and in padded last chunks, every row of the prompt is computed once, at its position."""
    prompt = random_prompts(1, seed=length)[0] * 300
    prompt = prompt[:length]
    result = make_runtime(max_model_len=300).generate([prompt], greedy(20))[0]
    assert list(result.token_ids) == plain(mixing_rule, prompt, 20)
    assert result.prompt_tokens == length


def test_eos_in_the_middle_of_an_accepted_path() -> None:
    """Tokens drafted and accepted after the end of the sequence are cut. Only the ids include EOS."""
    prompt = [*b"abcdefgh", EOS, *b"ijklmnop", *b"abc"]
    said = [*b"defgh", EOS, *b"ijklmnop"]
    runtime = make_runtime(script(said, len(prompt)))
    how = SpeculationParams(budget=Budget(20, 10, 2))
    result = runtime.generate([prompt], greedy(40), how)[0]
    assert list(result.token_ids) == said[:6]
    assert result.text == "defgh"
    assert result.finish_reason == "stop"
    assert result.metrics.num_steps == 1
    assert result.metrics.num_accepted_draft_tokens == 6  # tokens that were cut do not count
    beyond = runtime.generate(
        [prompt], greedy(14, ignore_eos=True), speculation=SpeculationParams(budget=Budget(20, 10, 2))
    )[0]
    assert list(beyond.token_ids) == said


@pytest.mark.parametrize(
    ("method", "prompt_length"), [("none", 98), ("ngram", 1), ("ngram", 90), ("ngram", 98), ("ngram", 99)]
)
def test_context_filled_exactly(method: str, prompt_length: int) -> None:
    """The text uses the last row of the buffer and no row past it, which the fake would refuse."""
    prompt = [97 + i % 3 for i in range(prompt_length)]
    result = make_runtime(max_model_len=100).generate(
        [prompt], greedy(1000), SpeculationParams(method, budget=Budget(12, 6, 3))
    )[0]
    assert result.finish_reason == "length"
    assert list(result.token_ids) == plain(mixing_rule, prompt, 100 - prompt_length)


def test_prompt_past_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt has 100 tokens and the context holds 100"):
        make_runtime(max_model_len=100).generate([[97] * 100])


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_ids_that_the_model_does_not_know_are_refused(token: int) -> None:
    """A tokenizer may have more tokens than the embedding has rows."""
    with pytest.raises(UsageError, match=f"the model knows 0 to {VOCABULARY - 1}"):
        make_runtime().generate([[97, token]])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda runtime: runtime.generate("def f("), "expected a list of prompts, found one; put it into a list"),
        (lambda runtime: runtime.generate([b"abc"]), "a prompt is a text or a list of token ids, not bytes"),
        (lambda runtime: runtime.generate([None]), "not NoneType"),
        (lambda runtime: runtime.generate([[97, 1.5]]), "a list of token ids, not list"),
        (
            lambda runtime: runtime.generate(["a"], [5]),
            "expected SamplingParams, .* found int",
        ),
    ],
)
def test_values_of_another_type_are_refused(use: Callable[[Runtime], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use(make_runtime())


def test_ids_of_numpy_are_ids() -> None:
    runtime = make_runtime()
    ids = np.array([BOS, 97])
    assert runtime.generate([ids], greedy(3))[0].token_ids == runtime.generate([ids.tolist()], greedy(3))[0].token_ids


def test_empty_prompt_is_the_bare_bos() -> None:
    result = make_runtime(script(b"hi", 1)).generate([""], greedy(2))[0]
    assert (result.text, result.prompt_tokens) == ("hi", 1)


def test_empty_prompt_without_bos_is_refused() -> None:
    with pytest.raises(UsageError, match="no beginning-of-sequence token"):
        make_runtime(bos=None).generate([""])


def test_unknown_method_and_option_are_refused() -> None:
    with pytest.raises(
        UsageError, match="no drafter 'nothing'; choose one of none, ngram, suffix, lookahead, or build"
    ):
        make_runtime().generate(["a"], speculation="nothing")
    with pytest.raises(UsageError, match="prompt_lookup_size"):
        make_runtime(options={"ngram": {"prompt_lookup_size": 3}}).generate(["a"])


def test_json_has_the_documented_fields() -> None:
    values = make_runtime().generate(["abc"], greedy(30))[0].to_json()
    assert list(values) == ["text", "token_ids", "finish_reason", "usage", "metrics"]
    assert values["usage"] == {"prompt_tokens": 3, "completion_tokens": 30}
    metrics = values["metrics"]
    assert set(metrics["stage_ms"]) == {"draft", "verify", "resample", "host"}
    for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length",
                 "draft_acceptance_rate", "decode_tokens_per_second", "time_to_first_token_ms"):  # fmt: skip
        assert metrics[name] >= 0
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == metrics["num_spec_steps"]
    assert sum(k * count for k, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert "synthetic" not in metrics


def test_margins_are_recorded_per_token_if_requested() -> None:
    runtime = make_runtime()
    result = runtime.generate(["abc"], greedy(20), record_logit_margins=True)[0]
    assert result.logit_margins == (2.0,) * 20
    assert runtime.generate(["abc"], greedy(20))[0].logit_margins is None


def test_synthetic_acceptance_is_forced_seeded_and_labelled() -> None:
    """Acceptance rates follow the request by depth, and the label marks all text of such a run."""
    runtime = make_runtime(lambda tokens: 97, max_model_len=1000, max_num_seqs=2)
    args = dict(speculation=SpeculationParams(budget=Budget(6, 3, 2)), synthetic_acceptance=(0.9, 0.5, 0.0))
    params = [greedy(600, seed=1), greedy(30, seed=1), greedy(30, seed=2)]
    first, again, other = runtime.generate(["a"] * 3, params, **args)
    assert first.token_ids[:20] == again.token_ids[:20] != other.token_ids[:20]
    assert first.metrics.to_json()["synthetic"] is True
    assert first.text.startswith("[synthetic")
    kept = first.metrics.acceptance_histogram
    assert len(kept) == 3
    assert 1 - kept[0] / sum(kept) == pytest.approx(0.9, abs=0.05)
    assert kept[2] / (kept[1] + kept[2]) == pytest.approx(0.5, abs=0.08)


def test_a_closed_runtime_refuses_calls() -> None:
    """A stream that began earlier fails after the text that was there."""

    def slow(tokens: list[int]) -> int:
        time.sleep(0.001)
        return mixing_rule(tokens)

    runtime = make_runtime(slow, max_model_len=2000)
    stream = runtime.stream([5, 6, 7], greedy(1900), "none")
    next(stream)
    runtime.close()
    runtime.close()
    uses = (
        lambda: list(stream), lambda: runtime.generate([[5]], greedy(2)), lambda: runtime.stream([5], greedy(2)),
        runtime.warm, runtime.__enter__, lambda: runtime.encode([5]),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="this runtime is closed; open it again"):
            use()


def test_more_threads_than_any_machine_starts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads must be at most 1024, not 100000; give one a core"):
        Runtime.open(tmp_path, threads=100_000)


@pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"threads": 0}, {"threads": -2}])
def test_less_than_one_slot_or_thread_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must be at least 1, not"):
        Runtime.open(tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"max_num_seqs": True}, {"max_total_tokens": "64"}, {"max_waiting": 1.5}])
def test_limits_are_whole_numbers(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must be a whole number, not"):
        Runtime.open(tmp_path, **options)  # type: ignore[arg-type]
