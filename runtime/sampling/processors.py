"""Processors change a row of logits by the tokens before it. Each has a state, which belongs to a path of a tree.

Their meanings are vLLM's, in this order: constraints, biases with banned tokens, minimum tokens, penalties, and the
user's own functions. Temperature and truncation come after them (`truncation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.params import LogitsProcessor, SamplingParams
from redraft.types import FloatArray, IntArray


class Processor(ABC):
    """Changes logits by the tokens of a path. Its methods raise UsageError if the request cannot go on."""

    def begin(self, prompt_tokens: Sequence[int]) -> Any:  # noqa: B027 (some have no state)
        """Return the state after the prompt."""

    def advance(self, state: Any, token: int) -> Any:  # noqa: B027 (as above)
        """Return the state after one more token. `state` stays as it is."""

    @abstractmethod
    def process(self, state: Any, logits: FloatArray) -> FloatArray:
        """Return the logits [V] of the next token after `state`. It may write into `logits`."""


def make_processors(params: SamplingParams, stop_tokens: Collection[int]) -> list[Processor]:
    """Return the processors of a request, in order, without those that would change nothing."""
    found: list[Processor] = []
    if params.logit_bias or params.banned_tokens:
        found.append(Biases(params.biases, params.banned_tokens))
    if params.min_tokens and stop_tokens:
        found.append(MinTokens(params.min_tokens, stop_tokens))
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        found.append(Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty))
    if params.logits_processors:
        found.append(Functions(params.logits_processors))
    return found


class Biases(Processor):
    """Adds a bias to some logits, and forbids banned tokens."""

    def __init__(self, biases: dict[int, float], banned: Sequence[int]) -> None:
        self._ids = np.array(list(biases), np.int64)
        self._biases = np.array(list(biases.values()), np.float32)
        self._banned = np.array(banned, np.int64)

    def process(self, state: None, logits: FloatArray) -> FloatArray:
        logits[self._ids] += self._biases
        logits[self._banned] = -np.inf
        return logits


class MinTokens(Processor):
    """Forbids end-of-sequence tokens until the answer has enough tokens. The state is their number."""

    def __init__(self, count: int, stop_tokens: Collection[int]) -> None:
        self._count = count
        self._stops = np.array(sorted(stop_tokens), np.int64)

    def begin(self, prompt_tokens: Sequence[int]) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def process(self, state: int, logits: FloatArray) -> FloatArray:
        if state < self._count:
            logits[self._stops] = -np.inf
        return logits


class Seen(NamedTuple):
    """Distinct token ids of a path [n], prompt included, and how often each is in the answer, float32[n]."""

    ids: IntArray
    counts: FloatArray


class Penalties(Processor):
    """Makes tokens of the text less likely: repetition (CTRL, Keskar et al. 2019, §4.1), presence and frequency.

    The repetition penalty counts tokens of prompt and answer, the other two those of the answer.
    """

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._repetition, self._presence, self._frequency = map(np.float32, (repetition, presence, frequency))

    def begin(self, prompt_tokens: Sequence[int]) -> Seen:
        """Return the prompt's ids, none of them counted."""
        ids = np.unique(np.array(prompt_tokens, np.int64))
        return Seen(ids, np.zeros(len(ids), np.float32))

    def advance(self, state: Seen, token: int) -> Seen:
        place = int(np.searchsorted(state.ids, token))
        if place == len(state.ids) or state.ids[place] != token:
            return Seen(np.insert(state.ids, place, token), np.insert(state.counts, place, 1))
        counts = state.counts.copy()
        counts[place] += 1
        return Seen(state.ids, counts)

    def process(self, state: Seen, logits: FloatArray) -> FloatArray:
        """Apply the repetition penalty, then the other two."""
        found = logits[state.ids]
        found = np.where(found > 0, found / self._repetition, found * self._repetition)
        found -= self._frequency * state.counts
        found -= self._presence * (state.counts > 0)
        logits[state.ids] = found
        return logits


class Functions(Processor):
    """Calls the user's functions. The state is the path's tokens."""

    def __init__(self, functions: Sequence[LogitsProcessor]) -> None:
        self._functions = functions

    def begin(self, prompt_tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(prompt_tokens)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def process(self, state: tuple[int, ...], logits: FloatArray) -> FloatArray:
        """Call every function. Tokens that were forbidden before stay forbidden.

        Raises UsageError if one raises, or returns anything but logits of this shape.
        """
        forbidden = np.isneginf(logits)
        for function in self._functions:
            try:
                changed = function(state, logits)
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(f"a logits processor raised {type(error).__name__}: {error}") from error
            logits = _checked(changed, logits.shape)
        logits[forbidden] = -np.inf
        return logits


def _checked(logits: object, shape: tuple[int, ...]) -> FloatArray:
    """Return a copy of a logits processor's result, which may be the processor's own array.

    Raises UsageError unless it is an array of this shape without NaN.
    """
    if logits is None:
        raise UsageError("a logits processor returned nothing", "return the logits")
    try:
        found = np.asarray(logits)
        if np.iscomplexobj(found):
            raise UsageError("a logits processor returned complex numbers", "return real logits")
        with np.errstate(over="ignore"):  # a huge negative logit forbids, as -inf does
            changed: FloatArray = np.array(found, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a logits processor returned no array of logits: {error}") from None
    if changed.shape != shape:
        raise UsageError(f"a logits processor returned an array of shape {changed.shape}, not {shape}")
    if np.isnan(changed).any():
        raise UsageError("a logits processor returned logits that are no numbers", "use -inf to forbid a token")
    return changed
