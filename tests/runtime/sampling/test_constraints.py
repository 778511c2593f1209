"""Constraints: which tokens may follow, after every path of a tree."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime.params import JSON_SCHEMA, LARK, REGEX, Grammar
from redraft.runtime.sampling.constraints import Constraint, GrammarState, guided_tokenizer
from tests.runtime.fakes import EOS, VOCABULARY, byte_text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM = 'start: number ("+" number)* ";"\nnumber: /[0-9]{1,3}/'
GUIDED = guided_tokenizer(byte_text().tokenizer, VOCABULARY, [EOS])


def constraint(kind: str = JSON_SCHEMA, text: str | None = None) -> Constraint:
    return Constraint(Grammar(kind, text or json.dumps(PERSON)), GUIDED)


def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    """Return the logits of a model that depends on every token."""
    return np.random.default_rng(tokens).normal(size=VOCABULARY).astype(np.float32)


def decoded(found: Constraint, seed: int, most: int = 400) -> str:
    """Return the text of plain decoding. Raises AssertionError if it does not end."""
    state, tokens = found.begin([seed]), []
    for _ in range(most):
        token = int(found.process(state, logits_after((seed, *tokens))).argmax())
        if token == EOS:
            return bytes(tokens).decode()
        tokens.append(token)
        state = found.advance(state, token)
    raise AssertionError("the text does not end")


def test_threads_may_share_a_constraint() -> None:
    """The mask of one thread must not be another's, whose call comes between."""
    found = constraint(REGEX, "ab")
    start = found.begin(())
    after = found.advance(start, ord("a"))

    class Interrupted:
        is_error = start.matcher.is_error

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            start.matcher.unsafe_compute_mask_ptr(address, size)
            found.process(after, np.zeros(VOCABULARY, np.float32))

    logits = found.process(GrammarState(Interrupted()), np.zeros(VOCABULARY, np.float32))
    assert np.isfinite(logits).nonzero()[0].tolist() == [ord("a")]


@pytest.mark.parametrize("seed", range(4))
def test_texts_follow_a_schema_a_regex_and_a_grammar(seed: int) -> None:
    found = json.loads(decoded(constraint(), seed))
    assert list(found) == ["name", "age", "tags"]
    assert len(found["name"]) <= 5
    assert 0 <= found["age"] <= 120
    assert set(found["tags"]) <= {"red", "green"}
    assert re.fullmatch("(ab|c){2,4}x", decoded(constraint(REGEX, "(ab|c){2,4}x"), seed))
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*;", decoded(constraint(LARK, SUM), seed))


def test_the_end_follows_a_complete_text_only() -> None:
    found = constraint(REGEX, "ab?")
    state = found.begin([])
    for token, ends in (("a", False), ("b", True)):
        assert (found.process(state, np.zeros(VOCABULARY, np.float32))[EOS] == 0) == ends
        state = found.advance(state, ord(token))
    last = found.process(state, np.zeros(VOCABULARY, np.float32))
    assert np.flatnonzero(last == 0).tolist() == [EOS]


def test_every_node_of_a_tree_has_the_state_of_its_path() -> None:
    found = constraint()
    rng = np.random.default_rng(0)
    paths, states = [()], [found.begin([7])]
    for _ in range(150):
        parent = int(rng.integers(len(paths)))
        logits = found.process(states[parent], np.zeros(VOCABULARY, np.float32))
        token = int(rng.choice(np.flatnonzero(logits == 0)))
        if token != EOS:
            paths.append((*paths[parent], token))
            states.append(found.advance(states[parent], token))
    for path, state in zip(paths, states, strict=True):
        alone = constraint()
        expected = alone.begin([7])
        for token in path:
            expected = alone.advance(expected, token)
        logits = [one.process(s, np.zeros(VOCABULARY, np.float32)) for one, s in ((found, state), (alone, expected))]
        assert logits[0].tobytes() == logits[1].tobytes()
        assert found.forced(state) == alone.forced(expected)


def test_forced_tokens_are_the_only_text() -> None:
    found = constraint()
    state = found.begin([])
    for token in b'{"':
        state = found.advance(state, token)
    assert bytes(found.forced(state)) == b'name"'


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (JSON_SCHEMA, '{"type": "nothing"}', "the JSON schema does not compile: Invalid type: nothing"),
        (JSON_SCHEMA, '{"items":' * 199 + "{}" + "}" * 199, "schema does not compile: recursion limit exceeded"),
        (JSON_SCHEMA, "{", "the JSON schema is not JSON"),
        (JSON_SCHEMA, "[" * 9999, "the JSON schema is not JSON: maximum recursion depth exceeded"),
        (JSON_SCHEMA, "[]", "a JSON schema is a JSON object"),
        (REGEX, "(", "the regular expression does not compile: .*regex parse error: unclosed group"),
        (REGEX, r"[^\s\S]", "no text matches the regular expression"),
        (LARK, 'start: "a" | other', "the grammar does not compile"),
    ],
)
def test_errors_before_generation(kind: str, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        constraint(kind, text)


def test_forbidden_tokens_that_leave_no_beginning() -> None:
    found = constraint(REGEX, "(ab|cd)e?")
    found.check_first({ord("a"), ord("b")}, VOCABULARY)
    with pytest.raises(UsageError, match="leave no token that can begin a text of the regular expression; change them"):
        found.check_first({ord("a"), ord("c")}, VOCABULARY)
    end = Constraint(Grammar(REGEX, ""), GUIDED)
    end.check_first((), VOCABULARY)
    with pytest.raises(UsageError, match="leave no token"):
        end.check_first({EOS}, VOCABULARY)


def test_a_token_outside_the_grammar_names_its_place() -> None:
    found = constraint(REGEX, "ab")
    state = found.advance(found.advance(found.begin([]), ord("a")), ord("x"))
    with pytest.raises(UsageError, match="continues the regular expression at token 2 of the text"):
        found.process(state, np.zeros(VOCABULARY, np.float32))


def test_a_model_without_an_end_token() -> None:
    with pytest.raises(UsageError, match="needs an end-of-sequence token"):
        guided_tokenizer(byte_text().tokenizer, VOCABULARY, [])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="constraints need the package llguidance; run `pip install"):
        guided_tokenizer(byte_text().tokenizer, VOCABULARY, [EOS])


def test_rows_longer_than_the_tokenizers_vocabulary() -> None:
    guided = guided_tokenizer(byte_text().tokenizer, VOCABULARY + 40, [EOS])
    found = Constraint(Grammar(REGEX, "a"), guided)
    logits = found.process(found.begin([]), np.zeros(VOCABULARY + 40, np.float32))
    assert np.flatnonzero(logits == 0).tolist() == [ord("a")]
