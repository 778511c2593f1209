"""Constraints: texts that match a JSON schema, a regular expression or a grammar. llguidance computes what may follow.

A constraint is a logits processor whose state is a matcher after the tokens of a path. Matchers copy in a few
microseconds, so each node of a draft tree has its own. Tokens that the matcher excludes get the logit -inf. The
end-of-sequence tokens may follow when the text is complete, and nothing else may if it cannot continue.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from redraft.errors import UsageError
from redraft.runtime.params import JSON_SCHEMA, REGEX, Grammar
from redraft.runtime.sampling.processors import Processor
from redraft.types import BoolArray, FloatArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_SPACES: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,32}"}
"""Spaces between JSON tokens. Their number is limited, since small models may repeat them until the text is full."""


@dataclass(frozen=True, slots=True)
class GrammarState:
    """A matcher after `tokens` generated tokens. Nobody changes a matcher that a state holds."""

    matcher: LLMatcher
    tokens: int = 0


def guided_tokenizer(tokenizer: tokenizers.Tokenizer, vocabulary: int, eos: Sequence[int]) -> LLTokenizer:
    """Return llguidance's form of a tokenizer, in a third of a second for 49 thousand tokens.

    vocabulary: length of a row of logits.   eos: the tokens that end a text.
    Raises UsageError without llguidance, without an end-of-sequence token, and for a tokenizer that it cannot read.
    """
    library = _library()
    if not eos:
        raise UsageError("a constraint needs an end-of-sequence token, and this model has none", "use another model")
    try:
        size = max(vocabulary, tokenizer.get_vocab_size())
        found: LLTokenizer = library.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(eos))
        return found
    except ValueError as error:
        raise UsageError(
            f"llguidance cannot read this model's tokenizer: {error}", "leave the constraint out"
        ) from None


def schema_error(schema: str) -> str | None:
    """Return why a JSON schema does not compile, None if it does. Raises UsageError without llguidance."""
    matcher = _library().LLMatcher
    try:
        error: str = matcher.validate_grammar(matcher.grammar_from_json_schema(schema, _SPACES))
    except ValueError as too_deep:
        error = str(too_deep)
    return _reason(error) if error else None


def schema_rule(schema: Mapping[str, Any]) -> str:
    """Return the right side of a rule of a Lark grammar whose texts match a JSON schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACES})}"


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "constraints need the package llguidance", "run `pip install 'redraft[constraints]'`"
        ) from None
    return llguidance


class Constraint(Processor):
    """A compiled grammar. Requests may share it, also in different threads."""

    def __init__(self, grammar: Grammar, tokenizer: LLTokenizer) -> None:
        """Compile. Raises UsageError if that fails, or if no token can begin a text."""
        from llguidance import LLMatcher

        self.name = grammar.kind
        try:
            self._start = LLMatcher(tokenizer, _source(grammar), log_level=0)
            error = self._start.get_error() if self._start.is_error() else None
        except ValueError as too_deep:
            error = str(too_deep)
        if error is not None:
            raise UsageError(f"the {grammar.kind} does not compile: {_reason(error)}", f"correct the {grammar.kind}")
        self._words = -(-tokenizer.vocab_size // 32)
        allowed = self._allowed(self._start.deep_copy())
        # If no token can spell a forced byte, the mask has a token that the matcher then refuses.
        if allowed is None or not self._start.deep_copy().consume_token(int(allowed.argmax())):
            raise UsageError(f"no text matches the {grammar.kind}", f"correct the {grammar.kind}")

    def check_first(self, forbidden: Collection[int], vocabulary: int) -> None:
        """Raise UsageError if these tokens are all that can begin a text. vocabulary: length of a row of logits."""
        allowed = np.isfinite(self.process(self.begin(()), np.zeros(vocabulary, np.float32)))
        allowed[list(forbidden)] = False
        if not allowed.any():
            raise UsageError(
                f"banned_tokens and min_tokens leave no token that can begin a text of the {self.name}",
                f"change them, or the {self.name}",
            )

    def begin(self, prompt_tokens: Sequence[int]) -> GrammarState:
        """Return the state before the first generated token. The prompt is no part of the constrained text."""
        return GrammarState(self._start.deep_copy())

    def advance(self, state: GrammarState, token: int) -> GrammarState:
        """Return the state after a token."""
        matcher = state.matcher.deep_copy()
        matcher.consume_token(token)  # `process` raises the error of a token that the grammar excludes
        return GrammarState(matcher, state.tokens + 1)

    def process(self, state: GrammarState, logits: FloatArray) -> FloatArray:
        """Set the logits [V] of excluded tokens to -inf, in place. Raises UsageError if no token may follow."""
        allowed = self._allowed(state.matcher)
        if allowed is None:
            raise UsageError(
                f"no token of the vocabulary continues the {self.name} at token {state.tokens} of the text",
                f"correct the {self.name}, or leave out other processors that contradict it",
            )
        np.copyto(logits, -np.inf, where=~allowed[: len(logits)])
        return logits

    def forced(self, state: GrammarState) -> list[int]:
        """Return the tokens that must follow a state, as far as it leaves no choice."""
        found: list[int] = state.matcher.compute_ff_tokens()
        return found

    def _allowed(self, matcher: LLMatcher) -> BoolArray | None:
        """Return which tokens may follow, bool[V] or longer; None if none may."""
        bits = np.zeros(self._words, np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error() or not bits.any():
            return None
        return np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)


def _reason(error: str) -> str:
    """Return the first line of llguidance's error, and its cause, which regular expressions have at the end."""
    first, *others = error.split("\n")
    causes = [line.strip() for line in others if line.startswith("error: ")]
    return f"{first} {causes[0].removeprefix('error: ')}" if causes else first


def _source(grammar: Grammar) -> str:
    """Return llguidance's form of a grammar."""
    from llguidance import LLMatcher

    source: str
    if grammar.kind == JSON_SCHEMA:
        source = LLMatcher.grammar_from_json_schema(grammar.text, _SPACES)
    elif grammar.kind == REGEX:
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = LLMatcher.grammar_from_lark(grammar.text)
    return source
