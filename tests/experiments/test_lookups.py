"""The cases of `experiments.lookups`."""

from __future__ import annotations

from experiments.lookups import _UNCHANGED, _cases
from redraft.bench.prompts import BenchPrompt


def test_a_question_without_a_word_to_replace_has_no_such_case() -> None:
    assert [name for name, *_ in _cases(BenchPrompt("1", "k", "a b c"), "", "")] == [
        "own text", "first", "again", "thanks", "please",
    ]  # fmt: skip


def test_a_replaced_word_finds_no_other_variant_in_its_store() -> None:
    """The tenant of this case is that of no other case."""
    cases = {
        name: (question, how) for name, question, how in _cases(BenchPrompt("1", "k", "name a colour, fast"), "", "x")
    }
    assert cases.pop("word") == ("name a something, fast", _UNCHANGED)
    assert _UNCHANGED not in [how for _, how in cases.values()]
    assert "unrelated" in cases
