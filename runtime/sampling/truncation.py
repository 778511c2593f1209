"""Temperature, top-k, top-p and min-p: from processed logits to the tokens that may be drawn.

The order is temperature, top-k, top-p, min-p. Each looks only at the tokens that the ones before it left, with their
probabilities normalized again. Noise is needed only for the tokens that are left.

Log probabilities are of the distribution from which the token is drawn: after all processors, temperature and
truncation. At temperature 0 they are of the processed logits at temperature 1. So a token that is never drawn has none,
and exp of the chosen token's log probability is how often it is drawn. (vLLM's default is before processors; its mode
`processed_logprobs` is this one.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.runtime.params import LEAST_TEMPERATURE, SamplingParams
from redraft.types import FloatArray, IntArray


class Support(NamedTuple):
    """The tokens that may be drawn.

    ids: ascending, or None for the whole vocabulary.   scores: float32[n], logits over temperature minus the largest.
    """

    ids: IntArray | None
    scores: FloatArray

    def token(self, place: int) -> int:
        """Return the token id at a place."""
        return place if self.ids is None else int(self.ids[place])

    def place(self, token: int) -> int:
        """Return the place of a token id of the support."""
        return token if self.ids is None else int(np.searchsorted(self.ids, token))

    def probs(self, vocabulary: int) -> NDArray[np.float64]:
        """Return the probability of every token of the vocabulary, float64[V]."""
        weights = np.exp(self.scores, dtype=np.float64)
        weights /= weights.sum()
        if self.ids is None:
            return weights
        found = np.zeros(vocabulary)
        found[self.ids] = weights
        return found

    def subset(self, places: IntArray) -> Support:
        """Return the tokens at these places, which ascend."""
        return Support(places if self.ids is None else self.ids[places], self.scores[places])


def support_of(logits: FloatArray, params: SamplingParams) -> Support:
    """Return the tokens that may follow, from processed logits [V], which it may overwrite.

    At temperature 0 the scores are those of temperature 1, of the whole vocabulary.
    Raises UsageError if no logit is above -inf, or one is NaN.
    """
    found = Support(None, _scores(logits, params.temperature or 1.0))
    if not params.temperature:
        return found
    if 0 < params.top_k < len(logits):
        found = _top_k(found, params.top_k)
    if params.top_p < 1:
        found = _top_p(found, params.top_p)
    if params.min_p > 0:
        found = found.subset(np.flatnonzero(found.scores >= log(params.min_p)))
    return found


def log_probs(scores: FloatArray) -> FloatArray:
    """Return log softmax of the scores of a support."""
    total = np.exp(scores).sum(dtype=np.float64)
    return np.asarray(scores - np.float32(log(total)), np.float32)


def no_numbers() -> UsageError:
    """Return the error of a row of logits with NaN."""
    return UsageError("the model's logits are no numbers (NaN)", "build it with another precision")


def _scores(logits: FloatArray, temperature: float) -> FloatArray:
    largest = logits.max()
    if largest != largest:
        raise no_numbers()
    if largest == -np.inf:
        raise UsageError("no token is left to choose: every logit is -inf")
    if largest == np.inf:  # a processor demands some tokens
        return np.where(logits == np.inf, np.float32(0), np.float32(-np.inf))
    logits -= largest
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature makes -inf of what it never draws
            logits /= np.float32(max(temperature, LEAST_TEMPERATURE))
    return logits


def _top_k(support: Support, k: int) -> Support:
    least = np.partition(support.scores, -k)[-k]
    return support.subset(np.flatnonzero(support.scores >= least))


def _top_p(support: Support, p: float) -> Support:
    """Keep the smallest set of likeliest tokens with probability `p` or more; of equal ones, those with lower ids.

    Only tokens above (1 - p) / n are sorted: the others of the n tokens have at most 1 - p together.
    """
    weights = np.exp(support.scores)
    total = float(weights.sum())
    likely = np.sort(weights[weights > (1 - p) / len(weights) * total * _MARGIN])[::-1]
    count = 1 + int(np.searchsorted(np.cumsum(likely, dtype=np.float64), p * total))
    least = likely[:count][-1]
    places = np.flatnonzero(weights >= least)
    if len(places) > count:
        equal = np.flatnonzero(weights[places] == least)
        places = np.delete(places, equal[count - len(places) :])
    return support.subset(places)


_MARGIN = 1 - 1e-6
"""For rounding: more tokens are sorted than needed."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of the answer, its log probability, and the likeliest tokens there with theirs, the likeliest first.

    top: at most as many as requested; fewer if truncation left fewer.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        top = [{"token_id": token, "logprob": value} for token, value in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top": top}


def token_logprobs(support: Support, place: int, alternatives: int) -> TokenLogprobs:
    """Return the log probabilities of the token at `place`, and of the `alternatives` likeliest of `support`.

    Of equally likely tokens, those with lower ids come first.
    """
    values = log_probs(support.scores)
    count = min(alternatives, len(values))
    likely = np.flatnonzero(values >= np.partition(values, -count)[-count]) if count else np.empty(0, np.int64)
    order = likely[np.argsort(-values[likely], kind="stable")][:count]
    top = [(support.token(found), float(values[found])) for found in order.tolist() if values[found] > -np.inf]
    return TokenLogprobs(support.token(place), float(values[place]), tuple(top))
