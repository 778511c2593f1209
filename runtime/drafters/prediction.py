"""Predicted outputs: a text that the caller expects the answer to repeat in part, followed as long as it agrees.

The place in the predicted text moves on with every committed token. If the answer leaves the text, it is sought again
near that place: a token may have been replaced, others left out or put in between. How often a predicted token comes
true, by how many tokens before it agreed, is learned while decoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence as Several

from redraft.methods.ngram import LONGEST_MATCH
from redraft.runtime.drafters.base import Drafter
from redraft.runtime.drafters.learning import LEAST_PROBABILITY, moved
from redraft.runtime.offers import Offer, OfferKey
from redraft.runtime.sequence import Sequence
from redraft.runtime.tree import make_tree
from redraft.runtime.verifier import Verifier
from redraft.types import Budget, OfferKind, Outcome, Tree

NEAR = 24
"""Tokens from the place in the text within which a single token that agrees is enough to go on from there."""
_CANDIDATES = 16
"""Places on either side that are compared."""
_LEARNING_RATE = 1 / 8
_UNMATCHED = 0.3
"""Share of predicted tokens that come true after one that did not, before anything is learned."""


class PredictedText:
    """A predicted text and the place in it that a sequence has reached.

    rates:   share of predicted tokens that come true, by the number of tokens before that agree.
    place:   of the token that comes next.
    matched: tokens before it that agree with the sequence, LONGEST_MATCH at most.
    """

    def __init__(self, text: Several[int], prompt_length: int) -> None:
        self.text = text
        self.rates = [1 - (1 - _UNMATCHED) / (1 + matched) for matched in range(LONGEST_MATCH + 1)]
        self.place = 0
        self.matched = LONGEST_MATCH // 2  # nothing disagrees yet
        self.drafted: list[int] = []
        self._seen = prompt_length
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, token in enumerate(text):
            self._places[token].append(place)

    def follow(self, tokens: Several[int]) -> None:
        """Move on with what was committed since the last call."""
        text = self.text
        for token in tokens[self._seen :]:
            agrees = self.place < len(text) and text[self.place] == token
            self.matched = min(self.matched + 1, LONGEST_MATCH) if agrees else 0
            self.place += 1  # one that disagrees may stand for the one that was predicted
        self._seen = len(tokens)
        if self.matched == 0:
            self._seek(tokens)

    def _seek(self, tokens: Several[int]) -> None:
        """Go on where the latest tokens stand in the text: the longest agreement, the nearest of several."""
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
        """How many tokens up to `place` agree with the latest ones."""
        length = 0
        while length < min(LONGEST_MATCH, place + 1, len(tokens)) and self.text[place - length] == tokens[-1 - length]:
            length += 1
        return length


class PredictionDrafter(Drafter):
    """See the module. Its requests must be given their prediction first."""

    name = "prediction"

    def __init__(self, verifier: Verifier) -> None:
        super().__init__(verifier)
        self._key = OfferKey(self.name, OfferKind.LOOKUP)

    def predict(self, seq: Sequence, text: Several[int]) -> None:
        """The answer to `seq` is expected to repeat parts of `text`."""
        seq.drafting[self] = PredictedText(text, seq.prompt_length)

    def offers(self, seq: Sequence, budget: Budget) -> Several[Offer]:
        """See `Drafter.offers`: the text that follows, as far as it is likely."""
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
        """Learn from the draft: its tokens came true or did not, verified or not."""
        found: PredictedText = seq.drafting[self]
        drafted, found.drafted = found.drafted, []
        for step, (token, target) in enumerate(zip(drafted, outcome.tokens, strict=False)):
            kind = min(found.matched + step, LONGEST_MATCH)
            found.rates[kind] = moved(found.rates[kind], token == target, _LEARNING_RATE)
            if token != target:
                return
