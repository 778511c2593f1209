"""The parameters of a request, validated on construction."""

# pylint: disable=too-many-lines  # all parameters of a request
from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from operator import index
from typing import Any, NamedTuple

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.controllers import ADAPTIVE, FIXED, parse_controller
from redraft.runtime.controllers.rules import LengthRule
from redraft.types import Budget, FloatArray

JSON_SCHEMA, REGEX, LARK = "JSON schema", "regular expression", "grammar"
_EXAMPLE = 'for example {"type": "object"}'


@dataclass(frozen=True)
class Grammar:
    """A constraint that a text must match.

    kind: JSON_SCHEMA, REGEX or LARK.   text: its source, for example the schema as JSON.
    Raises UsageError for a source that is not text, and for a JSON schema that is not a JSON object.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise UsageError(f"a {self.kind} is a text, not {self.text!r}")
        if self.kind != JSON_SCHEMA:
            return
        try:
            found = json.loads(self.text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema is not JSON: {error}", _EXAMPLE) from None
        if not isinstance(found, dict):
            raise UsageError(f"a JSON schema is a JSON object, not {found!r}", _EXAMPLE)


def requested_grammar(
    json_schema: str | None, regex: str | None, grammar: str | None, json_object: bool
) -> Grammar | None:
    """Return the one grammar of a request, or None. Raises UsageError for two, and for one that is not valid."""
    kinds = {"json_schema": JSON_SCHEMA, "regex": REGEX, "grammar": LARK, "json_object": JSON_SCHEMA}
    texts = (json_schema, regex, grammar, '{"type": "object"}' if json_object else None)
    given = {name: text for name, text in zip(kinds, texts, strict=True) if text is not None}
    if len(given) > 1:
        raise UsageError(f"a text can match one of {' and '.join(given)}", "give one of them")
    return next((Grammar(kinds[name], text) for name, text in given.items()), None)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as JSON. Raises UsageError for a value that JSON lacks."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema has a value that JSON lacks: {error}", _EXAMPLE) from None


def _no_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python's JSON has and JSON lacks."""
    raise ValueError(f"{name} is no number of JSON")


LogitsProcessor = Callable[[Sequence[int], FloatArray], FloatArray]
"""A function of all tokens up to a position, prompt included, and of the logits [V] there. It returns new logits [V].

The sampler calls it for the nodes of a draft tree that it reaches, with the tokens of the node's own path.
"""
COUPLED, REJECTION, BLOCK = "coupled", "rejection", "block"
ACCEPTANCE = (COUPLED, REJECTION, BLOCK)
SEEDS = 1 << 63
"""Seeds are below this."""
_LARGEST = 1e30
"""Largest bias, temperature and penalty, so that float32 does not overflow."""
LEAST_TEMPERATURE = 1e-30
"""Temperatures between 0 and this decode as this one: float32 has no reciprocal of smaller ones."""


class _Number(NamedTuple):
    """A parameter that is a number. Values of other types, as NumPy's, become `kind`: theirs overflow in keys of noise.

    allowed: the values that are allowed, in words.   is_allowed: true for such a value.
    """

    kind: type[int] | type[float]
    allowed: str
    is_allowed: Callable[[Any], bool]

    def parse(self, name: str, value: Any) -> float:
        """Return the value. Raises UsageError for another type, and for a value that is not allowed."""
        if not isinstance(value, Integral if self.kind is int else Real):
            raise UsageError(f"{name} must be {'a whole number' if self.kind is int else 'a number'}, not {value!r}")
        if not self.is_allowed(value):
            raise UsageError(f"{name} must be {self.allowed}, not {value}")
        return self.kind(value)  # type: ignore[call-overload]


_NUMBERS = {
    "max_tokens": _Number(int, "at least 1", lambda value: value >= 1),
    "min_tokens": _Number(int, "0 or above", lambda value: value >= 0),
    "temperature": _Number(float, "0 (greedy) or above, at most 1e30", lambda value: 0 <= value <= _LARGEST),
    "top_k": _Number(int, "0 (all) or above", lambda value: value >= 0),
    "top_p": _Number(float, "above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": _Number(float, "from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": _Number(float, "from 1e-30 to 1e30", lambda value: 1 / _LARGEST <= value <= _LARGEST),
    "presence_penalty": _Number(float, "from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": _Number(float, "from -2 to 2", lambda value: -2 <= value <= 2),
    "seed": _Number(int, "from 0 to 2^63 - 1", lambda value: 0 <= value < SEEDS),
}


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one prompt's continuation. Their meanings are vLLM's.

    max_tokens:  new tokens at most.   min_tokens: new tokens before an end-of-sequence token or a stop string counts.
    stop:        strings that end the text, which is cut before them.
    ignore_eos:  True to continue past end-of-sequence tokens.
    temperature: divides the logits; 0 is greedy, which ignores the next three.
    top_k:       keep the k likeliest tokens, and those as likely as the last of them; 0 keeps all.
    top_p:       keep the likeliest of these tokens, as few as have this probability together.
    min_p:       keep those of these tokens that are at least this share as likely as the likeliest.
    repetition_penalty: divides the logits of tokens in prompt or answer, and multiplies them if they are negative.
    presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once, and for each time.
    logit_bias:  added to the logits of these token ids.   banned_tokens: ids that are never chosen.
    kept_tokens: ids of special tokens that the text keeps, such as markers of tool calls; it leaves out all others.
    seed:        key of every random number of the request, from 0 to 2^63 - 1. Equal requests give equal tokens.
    logprobs:    None, or how many alternatives each token's log probability comes with (`Generation.logprobs`).
    logits_processors: functions that change the logits after all penalties, in this order.
    acceptance:  above temperature 0, how drafts are accepted. `coupled`: a draft must be the token that the verifier
                 draws, so tokens do not depend on speculation. `rejection` and `block`: drafters draw their candidates,
                 and tokens have the verifier's distribution (`redraft.runtime.sampling.rejection`).
    json_schema, regex, grammar, json_object: what the text must match, at most one of them: a JSON schema (a mapping or
                 JSON), a regular expression, a Lark grammar, or true for any JSON object.
    """

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    acceptance: str = COUPLED
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    kept_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:  # noqa: C901 - one check for each parameter
        object.__setattr__(self, "stop", _texts(self.stop))
        if not isinstance(self.logits_processors, list | tuple) or not all(map(callable, self.logits_processors)):
            raise UsageError("logits_processors must be a list of functions of token ids and logits")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("banned_tokens", "kept_tokens"):
            object.__setattr__(self, name, _token_ids(getattr(self, name), name))
        for name, number in _NUMBERS.items():
            object.__setattr__(self, name, number.parse(name, getattr(self, name)))
        for name in ("ignore_eos", "json_object"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.logprobs is not None and not (isinstance(self.logprobs, Integral) and self.logprobs >= 0):
            raise UsageError(f"logprobs must be None or a whole number from 0, not {self.logprobs!r}")
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        if self.acceptance not in ACCEPTANCE:
            raise UsageError(f"unknown acceptance {self.acceptance!r}", f"choose one of {', '.join(ACCEPTANCE)}")
        if self.constraint is not None and self.ignore_eos:
            raise UsageError("a constrained text ends with an end-of-sequence token", "leave ignore_eos out")
        if "" in self.stop:
            raise UsageError("a stop string must not be empty")
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}", "lower min_tokens")

    @property
    def constraint(self) -> Grammar | None:
        """The constraint that the text must match. Raises UsageError if there are two, or one of another type."""
        assert not isinstance(self.json_schema, Mapping)
        return requested_grammar(self.json_schema, self.regex, self.grammar, self.json_object)

    @property
    def biases(self) -> dict[int, float]:
        """The logit bias of each token id that has one."""
        return dict(self.logit_bias)

    @property
    def distribution(self) -> dict[str, float]:
        """The parameters that are numbers and change which tokens are chosen, by name."""
        lengths = ("max_tokens", "min_tokens")
        return {name: getattr(self, name) for name in _NUMBERS if name not in lengths}

    def forbidden(self, stop_tokens: Collection[int]) -> set[int]:
        """Return the ids that cannot be the first token, of a request that `stop_tokens` end."""
        return {*self.banned_tokens, *(stop_tokens if self.min_tokens else ())}

    def check_vocabulary(self, vocabulary: int, stop_tokens: Collection[int]) -> None:
        """Raise UsageError for a token id that the model lacks, and if no token is left to choose.

        stop_tokens: ids that end this request's text.
        """
        for name, ids in (("logit_bias", self.biases), ("banned_tokens", self.banned_tokens)):
            if unknown := [token for token in ids if not 0 <= token < vocabulary]:
                raise UsageError(f"{name} has the token id {unknown[0]}, the model knows 0 to {vocabulary - 1}")
        if len(self.forbidden(stop_tokens)) >= vocabulary:
            raise UsageError("banned_tokens and min_tokens leave no token to choose", "ban fewer tokens")
        if self.logprobs is not None and self.logprobs > vocabulary:
            raise UsageError(f"logprobs is {self.logprobs}, the model has {vocabulary} tokens")


@dataclass(frozen=True)
class SpeculationParams:
    """Parameters of one prompt's speculation. They do not change the text.

    method:     `none`, `ngram`, the id of one of the bundle's drafters, or `ngram+ID`; None is the bundle's default.
                `none` accepts no prediction and ignores budget and controller.
    prediction: text or token ids that the answer will repeat in part, as a further source of drafts.
    tenant:     key of requests that may draft from each other's outputs, if the method's option keeps outputs;
                None shares with nobody.
    budget:     limits of a step's tree. The controller `fixed` uses all of it, others at most this much.
    controller: how tree sizes are chosen: `adaptive`, `fixed`, or a rule for the length of drafts, with options after
                commas, such as `gammatune,delta=1` (`redraft.runtime.controllers`). None is `fixed` if `budget` is set,
                else `adaptive`.
    """

    method: str | None = None
    prediction: str | Sequence[int] | None = None
    budget: Budget | None = None
    controller: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if self.method is not None and (not isinstance(self.method, str) or not self.method):
            raise UsageError(f"method must be a word, not {self.method!r}")
        if self.prediction is not None and not isinstance(self.prediction, str):
            ids = _token_ids(self.prediction, "a prediction", "a text or a list of token ids")
            object.__setattr__(self, "prediction", ids)
        if self.tenant is not None:
            check_tenant(self.tenant)
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise UsageError(f"budget must be a Budget, not {self.budget!r}")
        if self.controller is not None and not isinstance(self.controller, str):
            raise UsageError(f"controller must be a text, not {self.controller!r}")
        if self._controller == (FIXED, None) and self.budget is None:
            raise UsageError("the controller fixed needs a budget", "give a budget, or a length such as fixed,gamma=5")

    @property
    def adapts(self) -> bool:
        """True if the adaptive controller chooses the size of trees."""
        return self._controller[0] == ADAPTIVE

    @property
    def rule(self) -> LengthRule | None:
        """The rule for the length of drafts; None if the size comes from costs, or is the budget's."""
        return self._controller[1]

    @property
    def _controller(self) -> tuple[str, LengthRule | None]:
        """The controller's name and rule. Raises UsageError for one that is unknown."""
        return parse_controller(self.controller or (ADAPTIVE if self.budget is None else FIXED))


def check_tenant(tenant: object) -> None:
    """Raise UsageError for a tenant's key that is not a text, or is empty."""
    if not isinstance(tenant, str) or not tenant:
        raise UsageError(f"a tenant's key must be a text that is not empty, not {tenant!r}")


def _texts(stop: object) -> tuple[str, ...]:
    """Return stop strings. Raises UsageError for other values."""
    found = (stop,) if isinstance(stop, str) else stop
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"stop must be a text or a list of texts, not {stop!r:.80}")
    return tuple(found)


def _biases(biases: object) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias. Raises UsageError for other values, and for a bias that is not finite."""
    try:
        pairs = [(index(token), float(bias)) for token, bias in dict(biases).items()]  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"logit_bias must map token ids to numbers, not {biases!r:.80}") from None
    for token, bias in pairs:
        if abs(bias) > _LARGEST and isfinite(bias):
            raise UsageError(f"logit_bias of token {token} is {bias:g}, the largest is {_LARGEST:g}")
        if not isfinite(bias):
            raise UsageError(f"logit_bias of token {token} is {bias}", "forbid a token with banned_tokens")
    return tuple(sorted(pairs))


def _token_ids(values: object, name: str, form: str = "a list of token ids") -> tuple[int, ...]:
    """Return token ids. Raises UsageError for any value but a list of whole numbers."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence | np.ndarray):
        found = type(values).__name__
        raise UsageError(f"{name} is {form}, not {found}")
    ids = []
    for token in values:
        try:
            ids.append(index(token))
        except TypeError:
            raise UsageError(f"{name}'s token ids are whole numbers, not {token!r}") from None
    return tuple(ids)
