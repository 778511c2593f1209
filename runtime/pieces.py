"""The text of one request as it is written, each token with the part of the step that it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple

from redraft.runtime.generation import Generation
from redraft.runtime.offers import Plan
from redraft.runtime.sequence import Sequence
from redraft.runtime.tokenizer import Detokenizer
from redraft.types import Outcome, Tree


class Origin(StrEnum):
    """The source of a token: the verifier itself, or an accepted draft of known text or of a drafter."""

    VERIFIER = "verifier"
    LOOKUP = "lookup"
    DRAFTER = "drafter"


class Piece(NamedTuple):
    """New text of one token; empty if the token only begins a character, or may begin a stop string."""

    text: str
    origin: Origin


def origins(plan: Plan, tree: Tree, outcome: Outcome) -> list[Origin]:
    """Return the origin of each of a step's tokens.

    A drafted node that the lookup had too counts for the lookup, as in `redraft.runtime.trace`. A tree on a device is
    all a drafter's.
    """
    if plan.make is None or tree.on_device:
        drafted = Origin.LOOKUP if plan.make is None else Origin.DRAFTER
        return [drafted] * len(outcome.path) + [Origin.VERIFIER] * (len(outcome.tokens) - len(outcome.path))
    known = list(zip(plan.found.parents.tolist(), plan.found.tokens.tolist(), strict=True))
    node, found = 0, []
    for token in outcome.tokens[: len(outcome.path)]:
        node = known.index((node, token)) if (node, token) in known else -2  # -2 is no node's parent
        found.append(Origin.LOOKUP if node > 0 else Origin.DRAFTER)
    return [*found, *[Origin.VERIFIER] * (len(outcome.tokens) - len(found))]


class Pieces:
    """A running request. Iterating decodes it and yields its pieces, once; `generation` is its result afterwards.

    Raises RequestError after the last piece of a request that failed, which has no result.
    """

    generation: Generation | None = None

    def __init__(
        self, request: Sequence, text: Detokenizer, steps: Iterator[None], finish: Callable[[], Generation]
    ) -> None:
        """steps: one verification a step.   finish: the request's result; raises RequestError."""
        self._request = request
        self._text = text
        self._steps = steps
        self._finish = finish
        self._origins = [Origin.VERIFIER]  # of the first token, and then of each step's

    def record(self, seq: Sequence, plan: Plan, tree: Tree, outcome: Outcome) -> None:
        """Keep the origins of a step's tokens. Set it as the `record` of the cycle."""
        self._origins = origins(plan, tree, outcome)

    def stop(self) -> None:
        """End the text after the step that has just been yielded."""
        self._request.finish_reason = self._request.finish_reason or "stop"

    def __iter__(self) -> Iterator[Piece]:
        request, text = self._request, self._text
        seen = request.prompt_length
        for _ in self._steps:
            made = request.tokens[seen:]
            for token, origin in zip(made, [*self._origins, *repeat(Origin.VERIFIER, len(made))], strict=False):
                seen += 1
                text.push(token)
                last = request.finish_reason is not None and seen == len(request.tokens)
                yield Piece(text.take(last), origin)
            self._origins = []  # a step whose request fails records none
        self.generation = self._finish()
