"""Questions for a chat verifier."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import CheckpointError, DataError
from redraft.train.data import Document, format_word_problem
from redraft.train.questions import ChatTurns, code_questions, edit_questions, prose_questions, word_problems

CODE = '''
import os

def undocumented(x):
    return x

class Thing:
    def area(self, width, height):
        """Return the area of a rectangle.

        More words.
        """
        return width * height
'''
FORMS = 6


class Words:
    """A tokenizer of single characters with a chat template."""

    chat_template = "yes"
    all_special_ids = (ord("<"),)

    def __init__(self, shown="<u>{}<end>\n<a>"):
        self.shown = shown

    def apply_chat_template(self, messages, **_):
        return self.shown.format(messages[0]["content"])

    def encode(self, text, add_special_tokens=False):
        assert not add_special_tokens
        return [ord(character) for character in text]


def turns(monkeypatch, tokenizer, ends=frozenset([7])):
    monkeypatch.setattr("redraft.train.questions.AutoTokenizer.from_pretrained", lambda folder: tokenizer)
    return ChatTurns.of("model", ends)


def test_the_users_turn_is_cut_out_of_the_template(monkeypatch):
    found = turns(monkeypatch, Words())
    assert "".join(map(chr, found.before)) == "<u>"
    assert "".join(map(chr, found.ask("why?"))) == "<u>why?<end>\n<a>"
    assert found.ends == {ord("<"), 7}  # the special token after the message ends a turn
    assert turns(monkeypatch, Words(), frozenset()).ends == {ord("<")}
    for shown in ("User: {}\n\nAssistant:", "ask {}"):  # an ordinary token after the message ends no turn
        assert turns(monkeypatch, Words(shown)).ends == {7}


def test_a_model_without_a_chat_template_is_refused(monkeypatch):
    bare = Words()
    bare.chat_template = None
    with pytest.raises(CheckpointError, match="model has no chat template"):
        turns(monkeypatch, bare)
    with pytest.raises(CheckpointError, match="does not show the user's message"):
        turns(monkeypatch, Words("nothing"))


def test_an_edit_repeats_the_function_and_may_rename_its_parameter():
    seen = set()
    for seed in range(40):
        (found,) = edit_questions([Document("code", "a.py", CODE)], np.random.default_rng(seed))
        edit, _, source = found.partition("\n\n")
        assert source.startswith("```python\ndef area(self, width, height):\n")
        assert source.endswith("return width * height\n```")
        seen.add(edit)
    assert any("`width` of this function to `width_value`" in edit for edit in seen)
    assert not any("`self`" in edit for edit in seen)
    assert len(seen) > 5


def test_a_function_with_a_docstring_gives_three_questions_of_different_forms():
    seen = set()
    for seed in range(20):
        found = code_questions([Document("code", "a.py", CODE)], np.random.default_rng(seed))
        assert len(found) == len(set(found)) == 3
        assert found[0].startswith("def area(self, width, height):\n")
        assert found[0].endswith('    """\n')  # ends after the docstring
        assert not any("undocumented" in question for question in found)
        seen.update(found[1:])
    assert len(seen) == FORMS
    assert not code_questions([Document("code", "a.py", "def (")], np.random.default_rng(0))  # it does not parse
    assert sum("return width * height" in question for question in seen) == 3


def test_word_problems_are_asked_without_their_answers():
    assert word_problems([Document("math", "a", format_word_problem("How many?", "Two."))]) == ["How many?"]


def test_passages_come_from_the_documents_and_every_form_occurs():
    words = [f"w{i}" for i in range(2000)]
    found = prose_questions([Document("prose", "book", " ".join(words))], 200, np.random.default_rng(0))
    assert len(found) == 200
    inside = [[word for word in question.split() if word in words] for question in found]
    assert all(40 <= len(part) < 110 for part in inside)
    assert all(part == words[int(part[0][1:]) :][: len(part)] for part in inside)
    for begin in ("Summarize", "Translate", "Rewrite this", "Continue", "Rewrite the", "List"):
        assert any(question.startswith(begin) for question in found), begin
    with pytest.raises(DataError, match="no document of prose has 220 words"):
        prose_questions([Document("prose", "short", "a b c")], 1, np.random.default_rng(0))
