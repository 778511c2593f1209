"""Comparisons over the toy verifier: the prompts that every method continues, in a chat and without one."""

from __future__ import annotations

import pytest
from tests.runtime.fakes import make_runtime

from redraft.bench.compare import INEXACT, PLAIN, Settings, compare, in_turns
from redraft.bench.prompts import BenchPrompt
from redraft.errors import RedraftError, UsageError
from redraft.runtime import Budget, Runtime, SamplingParams
from redraft.runtime.drafters.ngram import NgramDrafter

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
TURNS = BenchPrompt("p", "k", "one", ("two", "three"))
PARAMS = SamplingParams(max_tokens=8)


def letters(tokens: list[int]) -> int:
    """A model that writes letters only, so that its answers are whole characters."""
    return 97 + sum(tokens) % 26


def chats(max_model_len: int = 200) -> Runtime:
    """A runtime whose template shows roles and messages."""
    return make_runtime(letters, max_model_len=max_model_len, template=TEMPLATE)


def test_every_turn_continues_the_plain_answers() -> None:
    """Forced acceptance makes the other method write other texts, but prompts must not contain them."""
    settings = Settings(PARAMS, acceptance=(1.0, 1.0), chat=True, system="s")
    runtime = chats()
    runs = compare(runtime, [TURNS], ["ngram"], settings)
    assert [run.turn for run in runs] == [1, 2, 3]
    assert any(run.generations[PLAIN].text != run.generations["ngram"].text for run in runs)
    expected = "s:s;"
    for run, text in zip(runs, TURNS.turns, strict=True):
        expected += f"u:{text};"
        assert runtime.tokenizer.decode(run.token_ids) == expected
        expected += f"a:{run.generations[PLAIN].text};"


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded() -> None:
    reports: list[str] = []
    for settings in (Settings(PARAMS), Settings(PARAMS, chat=True)):
        with pytest.raises(UsageError, match=r"prompt long: the .* has .* tokens and the context holds 30"):
            compare(chats(30), [TURNS, BenchPrompt("long", "k", "a" * 30)], ["ngram"], settings, reports.append)
    assert not reports


def test_a_chat_that_outgrows_the_context_ends_there() -> None:
    other = BenchPrompt("q", "k", "b", ("c",))
    runs = compare(chats(22), [TURNS, other], ["ngram"], Settings(PARAMS, chat=True))
    assert [(run.prompt.id, run.turn) for run in runs] == [("p", 1), ("q", 1), ("q", 2)]


def test_a_drafter_that_fails_is_not_timed_as_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("broke")

    monkeypatch.setattr(NgramDrafter, "offers", fail)
    with pytest.raises(RedraftError, match="broke"):
        compare(make_runtime(), [TURNS], ["ngram"], Settings(PARAMS))


def test_inexact_decoding_is_plain_decoding_by_the_other_runtime() -> None:
    """Plain decoding ignores both a budget and forced acceptance."""
    settings = Settings(PARAMS, Budget(nodes=4, depth=4, width=1), acceptance=(1.0,))
    (run,) = compare(make_runtime(), [TURNS], [INEXACT, "ngram"], settings, inexact=make_runtime(letters))
    (alone,) = compare(make_runtime(letters), [TURNS], [], Settings(PARAMS))
    assert list(run.generations) == [PLAIN, INEXACT, "ngram"]
    assert run.generations[INEXACT].token_ids == alone.generations[PLAIN].token_ids
    assert run.generations[INEXACT].token_ids != run.generations[PLAIN].token_ids
    assert run.generations[INEXACT].metrics.num_draft_tokens == 0


def test_the_order_flips_within_each_kind_after_a_warm_up() -> None:
    warmed: list[str] = []
    lines: list[str] = []
    orders = list(in_turns(["p", "q"], ["code", "prose", "code", "prose", "code"], warmed.append, lines.append))
    assert warmed == ["p", "q"]
    assert orders == [["p", "q"], ["p", "q"], ["q", "p"], ["q", "p"], ["p", "q"]]
    assert lines == ["warming up p", "warming up q", *(f"prompt {number} of 5" for number in range(1, 6))]
