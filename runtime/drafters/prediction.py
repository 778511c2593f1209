"""Predicted outputs: it drafts from a text that the caller expects the answer to repeat in part.

The position in the predicted text advances with every committed token. If the answer differs from the text, the drafter
searches near that position, since tokens may be replaced, missing or added. It learns while decoding how often a
predicted token is correct, by the number of tokens before it that agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence as Several

from redraft.methods.unbuilt import LONGEST_MATCH
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.learning import LEAST_PROBABILITY, moved
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, OfferKind, Outcome, Tree

NEAR = 24
"""Largest distance from the current position at which one equal token is enough to continue."""
_CANDIDATES = 16
"""Positions on either side that are compared."""
_LEARNING_RATE = 1 / 8
_UNMATCHED = 0.3
"""Share of correct tokens directly after a wrong one, before anything is learned."""


class PredictedText:
    """A predicted text, and the position in it that a sequence has reached.

    rates:   share of correct tokens, by the number of tokens before that agree.
    place:   position of the next token.
    matched: tokens before it that agree with the sequence, at most LONGEST_MATCH.
    """

    def __init__(self, text: Several[int], prompt_length: int) -> None:
        self.text = text
        self.rates = [1 - (1 - _UNMATCHED) / (1 + matched) for matched in range(LONGEST_MATCH + 1)]
        self.place = 0
        self.matched = LONGEST_MATCH // 2  # no token has differed yet
        self.drafted: list[int] = []
        self._seen = prompt_length
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, token in enumerate(text):
            self._places[token].append(place)

    def follow(self, tokens: Several[int]) -> None:
        """Advance by the tokens committed since the last call."""
        text = self.text
        for token in tokens[self._seen :]:
            agrees = self.place < len(text) and text[self.place] == token
            self.matched = min(self.matched + 1, LONGEST_MATCH) if agrees else 0
            self.place += 1  # a different token may replace the predicted one
        self._seen = len(tokens)
        if self.matched == 0:
            self._seek(tokens)

    def _seek(self, tokens: Several[int]) -> None:
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

    def _agreement(self, tokens: Several[int], place: int) -> int:
        """Return how many tokens up to `place` agree with the latest ones."""
        length = 0
        while length < min(LONGEST_MATCH, place + 1, len(tokens)) and self.text[place - length] == tokens[-1 - length]:
            length += 1
        return length


class PredictionDrafter(Drafter):
    """Drafts from predicted outputs. A request needs its prediction before it begins."""

    name = "prediction"

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    def predict(self, seq: Sequence, text: Several[int]) -> None:
        """Set `text` as the prediction for `seq`."""
        seq.drafting[self] = PredictedText(text, seq.prompt_length)

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """Return a chain of the predicted tokens that follow, while they are likely enough."""
        found: PredictedText = seq.drafting[self]
        found.follow(seq.tokens)
        tokens, probs, prob = [seq.tokens[-1]], [1.0], 1.0
        for step, token in enumerate(found.text[found.place : found.place + min(budget.depth, budget.nodes)]):
            prob *= found.rates[min(found.matched + step, LONGEST_MATCH)]
            if prob <= LEAST_PROBABILITY:
                break
            tokens.append(token)
            probs.append(prob)
        found.drafted = tokens[1:]
        if not found.drafted:
            return ()
        return (Offer(self._key, make_tree(tokens, list(range(-1, len(tokens) - 1)), probs)),)

    def accept(self, seq: Sequence, tree: Tree, outcome: Outcome) -> None:
        """Learn from the draft: its tokens are correct or wrong, verified or not."""
        found: PredictedText = seq.drafting[self]
        drafted, found.drafted = found.drafted, []
        for step, (token, target) in enumerate(zip(drafted, outcome.tokens, strict=False)):
            kind = min(found.matched + step, LONGEST_MATCH)
            found.rates[kind] = moved(found.rates[kind], token == target, _LEARNING_RATE)
            if token != target:
                return
