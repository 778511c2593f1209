"""Text that grows token by token: whole characters, stop strings, chat templates."""

from __future__ import annotations

import random
from typing import Any

import pytest

from redraft.runtime import SpeculationParams
from redraft.runtime.text import tokenizer
from redraft.runtime.text.tokenizer import Detokenizer
from redraft.types import Budget
from tests.runtime.fakes import BOS, EOS, byte_text, greedy, make_runtime, script

WORDS = "naïve 日本語 🙂🙂 e\u0301 ok "


@pytest.mark.parametrize("budget", [Budget(0, 0, 0), Budget(12, 5, 3), None], ids=str)
def test_chunks_are_whole_characters_and_join_to_the_text(budget: Budget | None) -> None:
    said = (WORDS * 3).encode()
    runtime = make_runtime(script(said, 2))
    chunks = list(runtime.stream("ab", greedy(len(said)), speculation=SpeculationParams(budget=budget)))
    assert "".join(chunks) == WORDS * 3
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert len(chunks) > 5
    assert (
        runtime.generate(["ab"], greedy(len(said)), speculation=SpeculationParams(budget=budget))[0].text == WORDS * 3
    )


def test_a_character_cut_by_max_tokens_is_left_out() -> None:
    said = "ab🙂".encode()
    runtime = make_runtime(script(said, 1))
    assert "".join(runtime.stream("x", greedy(len(said) - 1))) == "ab"
    result = runtime.generate(["x"], greedy(len(said) - 1))[0]
    assert result.text == "ab"
    assert len(result.token_ids) == len(said) - 1


def test_bytes_that_never_make_a_character_do_not_delay_later_text() -> None:
    runtime = make_runtime(script(b"a\xffbc", 1))
    assert "".join(runtime.stream("x", greedy(4))) == "a\ufffdbc"


@pytest.mark.parametrize("budget", [Budget(0, 0, 0), Budget(12, 6, 2)], ids=str)
@pytest.mark.parametrize("stop", [("END",), ("never", "D."), ("N", "END"), ("🙂E",)])
def test_stop_strings_end_the_text_before_them(stop: tuple[str, ...], budget: Budget) -> None:
    """Text that may begin a stop string is held back, across chunks and paths. Tokens after the end are cut."""
    said = "EN EN EN 🙂END. EN EN EN"
    full = said.encode()
    runtime = make_runtime(script(full, 1))
    expected = said[: min(said.find(word) for word in stop if word in said)]
    chunks = list(runtime.stream("x", greedy(200, stop=stop), speculation=SpeculationParams(budget=budget)))
    assert "".join(chunks) == expected
    result = runtime.generate(["x"], greedy(200, stop=stop), speculation=SpeculationParams(budget=budget))[0]
    assert (result.text, result.finish_reason) == (expected, "stop")
    ends = [full.find(word.encode()) + len(word.encode()) for word in stop if word in said]
    assert len(result.token_ids) == min(ends)


def test_text_that_only_began_a_stop_string_comes_out_in_the_end() -> None:
    runtime = make_runtime(script(b"abcEN", 1))
    chunks = list(runtime.stream("x", greedy(5, stop=("END",))))
    assert "".join(chunks) == "abcEN"


def test_text_comes_out_once_no_stop_string_is_possible() -> None:
    stream = Detokenizer(byte_text(), [], ("END",))
    taken = [(stream.push(token), stream.take())[1] for token in b"xEzEN!"]
    assert taken == ["x", "", "Ez", "", "", "EN!"]


def test_a_text_knows_the_stop_string_that_ended_it() -> None:
    stream = Detokenizer(byte_text(), [], ("ab", "d", "cd"))
    assert [(stream.push(token), stream.stop) for token in b"xcd"] == [(False, None), (False, None), (True, "cd")]
    assert stream.text == "x"


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    draw = random.Random(5)
    for _ in range(300):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        stream = Detokenizer(byte_text(), [], stops, min_tokens=draw.choice([0, 30]))
        taken = ""
        for token in draw.choices(b"ab", k=30):
            if stream.push(token):
                break
            taken += stream.take()
            text = stream.text
            ends = [n for n in range(len(text) + 1) if any(n < len(s) and s.startswith(text[-n:]) for s in stops if n)]
            assert text[len(taken) :] == text[len(text) - max(ends, default=0) :]


def test_a_token_costs_no_search_of_whole_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counting(*arguments: Any) -> int:
        nonlocal compared
        compared += 1
        return longer(*arguments)

    longer = tokenizer._longer
    stream = Detokenizer(byte_text(), [], ["a" * 250 + chr(98 + number) for number in range(16)])
    monkeypatch.setattr(tokenizer, "_longer", counting)
    for token in b"a" * 400:
        stream.push(token)
        stream.take()
    assert compared == 400 * 16


def test_special_tokens_do_not_show() -> None:
    stream = Detokenizer(byte_text(), [256])
    for token in [97, 256, 98, 257]:
        stream.push(token)
    assert stream.text == "ab"


@pytest.mark.parametrize("stop", [(), ("END",)], ids=["no stop string", "a stop string"])
def test_special_tokens_that_a_request_keeps_show(stop: tuple[str, ...]) -> None:
    """Markers of tool calls are special tokens of some models. Results and streams both have them."""
    said = [*b"a", BOS, *"🙂".encode(), BOS, BOS, *b"ENb", EOS]
    runtime = make_runtime(script(said, 1))
    for kept, expected in [((), "a🙂ENb"), ((BOS,), "a<s>🙂<s><s>ENb")]:
        params = greedy(40, stop=stop, kept_tokens=kept)
        assert "".join(runtime.stream("x", params)) == expected
        assert runtime.generate(["x"], params)[0].text == expected


def test_a_stop_string_may_have_a_special_token_that_is_kept() -> None:
    stream = Detokenizer(byte_text(), [BOS, 97], ("b<s>",), keep=[BOS])
    assert [stream.push(token) for token in [97, 98, EOS, BOS]] == [False, False, False, True]
    assert stream.text == "a"


def test_only_special_tokens_have_special_ids() -> None:
    found = byte_text()
    found.tokenizer.add_tokens(["<tool_call>"])
    assert found.special_ids(["<tool_call>", "</s>", "a", "absent", "<s>"]) == (EOS, BOS)
    ids = [97, 258, EOS, BOS]
    assert found.decode(ids) == "a<tool_call>"
    assert found.decode(ids, {BOS}) == "a<tool_call><s>"
