"""Chains from what a request states itself: its predicted output, and tokens that its constraint forces.

The position in the predicted text advances with every committed token. If the answer differs from the text, the drafter
searches near that position, since tokens may be replaced, missing or added. It learns while decoding how often a
predicted token is correct, by the number of tokens before it that agree.

A constraint forces bytes, and the usual tokens for them are drafted. The model may still choose other tokens for the
same bytes, so the drafter learns how often it does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from redraft.methods.unbuilt import LONGEST_MATCH
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.lookup import LEAST_PROBABILITY, moved
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.constraints import Constraint
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Offer, OfferKey
from redraft.runtime.trees.tree import make_tree
from redraft.types import Budget, OfferKind, Outcome, Tree

NEAR = 24
"""Largest distance from the current position at which one equal token is enough to continue."""
_CANDIDATES = 16
"""Positions on either side that are compared."""
_PREDICTION_RATE = 1 / 8
_UNMATCHED = 0.3
"""Share of correct tokens directly after a wrong one, before anything is learned."""


class PredictedText:
    """A predicted text, and the position in it that a sequence has reached.

    rates:   share of correct tokens, by the number of tokens before that agree.
    place:   position of the next token.
    matched: tokens before it that agree with the sequence, at most LONGEST_MATCH.
    accepted, rejected: drafted tokens that the sequence took, and those in whose place it took another.
    """

    def __init__(self, text: Sequence[int], prompt_length: int) -> None:
        self.text = text
        self.rates = [1 - (1 - _UNMATCHED) / (1 + matched) for matched in range(LONGEST_MATCH + 1)]
        self.place = 0
        self.matched = LONGEST_MATCH // 2  # no token has differed yet
        self.accepted = self.rejected = 0
        self.drafted: list[int] = []
        self._seen = prompt_length
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, token in enumerate(text):
            self._places[token].append(place)

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens committed since the last call."""
        text = self.text
        for token in tokens[self._seen :]:
            agrees = self.place < len(text) and text[self.place] == token
            self.matched = min(self.matched + 1, LONGEST_MATCH) if agrees else 0
            self.place += 1  # a different token may replace the predicted one
        self._seen = len(tokens)
        if self.matched == 0:
            self._seek(tokens)

    def expected(self, most: int) -> Sequence[int]:
        """Return at most `most` tokens of the text that follow."""
        return self.text[self.place : self.place + most]

    def probability(self, step: int) -> float:
        """Return how likely the token `step` tokens after the next one is, given those before it."""
        return self.rates[min(self.matched + step, LONGEST_MATCH)]

    def learn(self, step: int, is_correct: bool) -> None:
        """Learn whether a drafted token was correct."""
        self.accepted += is_correct
        self.rejected += not is_correct
        kind = min(self.matched + step, LONGEST_MATCH)
        self.rates[kind] = moved(self.rates[kind], is_correct, _PREDICTION_RATE)

    def _seek(self, tokens: Sequence[int]) -> None:
        """Continue at the position with the longest agreement with the latest tokens, the nearest of several."""
        places = self._places.get(tokens[-1], [])
        middle = bisect_left(places, self.place)
        near = places[max(middle - _CANDIDATES, 0) : middle + _CANDIDATES]
        best = (0, 0, self.place)
        for place in near:
            length, away = self._agreement(tokens, place), abs(place + 1 - self.place)
            if length > 1 or away <= NEAR:
                best = max(best, (length, -away, place + 1))
        self.matched, _, self.place = best

    def _agreement(self, tokens: Sequence[int], place: int) -> int:
        """Return how many tokens up to `place` agree with the latest ones."""
        length = 0
        while length < min(LONGEST_MATCH, place + 1, len(tokens)) and self.text[place - length] == tokens[-1 - length]:
            length += 1
        return length


_FORCED_RATE = 1 / 16
_ASSUMED = 0.98
"""Share of forced tokens that the model chooses, before anything is learned."""


class ForcedTokens:
    """A constraint, and its state after the first `_seen` tokens of a sequence.

    rate: share of forced tokens that the model chose.
    """

    def __init__(self, constraint: Constraint, tokens: Sequence[int]) -> None:
        self.rate = _ASSUMED
        self.drafted: list[int] = []
        self._constraint = constraint
        self._state = constraint.begin(tokens)
        self._seen = len(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens committed since the last call."""
        for token in tokens[self._seen :]:
            self._state = self._constraint.advance(self._state, token)
        self._seen = len(tokens)

    def expected(self, most: int) -> list[int]:
        """Return at most `most` tokens that must follow."""
        return self._constraint.forced(self._state)[:most]

    def probability(self, step: int) -> float:
        """Return how likely each token is, given those before it."""
        return self.rate

    def learn(self, step: int, is_correct: bool) -> None:
        """Learn whether a drafted token was chosen."""
        self.rate = moved(self.rate, is_correct, _FORCED_RATE)


class ChainLookup(Drafter):
    """Drafts a chain of the tokens that a request expects, while they are likely enough.

    The state of a sequence is a `PredictedText` or `ForcedTokens`, which a request needs before it begins.
    """

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    def offers(self, seq: Request, budget: Budget) -> Sequence[Offer]:
        """Return the chain, unless it has no token."""
        state: PredictedText | ForcedTokens = seq.drafting[self]
        state.follow(seq.tokens)
        tokens, probs = [seq.tokens[-1]], [1.0]
        for step, token in enumerate(state.expected(min(budget.depth, budget.nodes))):
            prob = probs[-1] * state.probability(step)
            if prob <= LEAST_PROBABILITY:
                break
            tokens.append(token)
            probs.append(prob)
        state.drafted = tokens[1:]
        if not state.drafted:
            return ()
        return (Offer(self._key, make_tree(tokens, list(range(-1, len(tokens) - 1)), probs)),)

    def accept(self, seq: Request, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft: its tokens are correct or wrong, verified or not."""
        state: PredictedText | ForcedTokens = seq.drafting[self]
        drafted, state.drafted = state.drafted, []
        for step, (token, target) in enumerate(zip(drafted, outcome.tokens, strict=False)):
            state.learn(step, token == target)
            if token != target:
                return


class PredictionDrafter(ChainLookup):
    """Drafts from predicted outputs."""

    name = "prediction"

    def predict(self, seq: Request, text: Sequence[int]) -> None:
        """Set `text` as the prediction for `seq`."""
        seq.drafting[self] = PredictedText(text, seq.prompt_length)


class ForcedDrafter(ChainLookup):
    """Drafts the tokens that a constraint leaves no choice about, such as names of JSON keys."""

    name = "forced"

    def constrain(self, seq: Request, constraint: Constraint) -> None:
        """Set the constraint of `seq`."""
        seq.drafting[self] = ForcedTokens(constraint, seq.tokens)
