"""What a stream tells of each step if its request has `redraft.steps`: the source of each token, and the draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.runtime.generation import Origin, StepRecord, recorded
from redraft.runtime.requests.request import Request
from redraft.runtime.server.answers import ChatChoice
from redraft.runtime.server.parts import Content, Part, Reasoning
from redraft.runtime.server.reading import ChatReader
from redraft.runtime.server.rendering import Json
from redraft.runtime.server.tokens import TokenTexts
from redraft.runtime.server.tool_formats import AnswerFormat
from redraft.runtime.submission import Written
from redraft.types import NOT_REACHED

BONUS, PLAIN = "bonus", "plain"
"""Sources of the verifier's own tokens: after a draft, and of a step without one."""
_FIELDS: tuple[tuple[type[Content] | type[Reasoning], str], ...] = (
    (Reasoning, "reasoning_content"), (Content, "content"),
)  # fmt: skip


class ExplainedChoice(ChatChoice):
    """A choice of a chat whose chunks have a `redraft` object, one for each step.

    tokens: objects of `ids`, their `sources`, and the text that these tokens complete as `content` or
            `reasoning_content`. Tokens that share a character, or that may begin a stop string or a marker, are in one
            object. Joined, the texts are those of the answer, and the objects do not depend on the steps.
    tree:   `tree_of` the step, if it verified a draft.
    """

    def _reading(self, index: int, request: Request, form: AnswerFormat) -> ChatReader:
        self._explained = ExplainedReader(index, request, form)
        return self._explained

    def push(self, written: Written) -> list[Json]:
        """Return the chunks of an output, at least one."""
        first, *others = super().push(written) or [self._chunk({})]
        tree = tree_of(recorded(written.output.step), self._texts)
        return [{**first, "redraft": {"tokens": self._explained.take(), **({"tree": tree} if tree else {})}}, *others]


class ExplainedReader(ChatReader):
    """Reads outputs token by token, and keeps what to tell of them."""

    def __init__(self, index: int, request: Request, form: AnswerFormat) -> None:
        super().__init__(index, request, form)
        self._open: tuple[list[int], list[str]] = [], []
        self._told: list[Json] = []

    def take(self) -> list[Json]:
        """Return the objects of the tokens that were read since the last call."""
        told, self._told = self._told, []
        return told

    def _read(self, written: Written) -> list[Part]:
        """Return the parts of an output, which are read token by token."""
        output, found = written.output, list[Part]()
        sources = sources_of(written)
        for number, piece in enumerate(written.pieces):
            if number < len(output.token_ids):
                self._open[0].append(output.token_ids[number])
                self._open[1].append(sources[number])
            parts = self._parser.push(piece.text)
            if parts:
                self._tell(parts)
            found += parts
        if output.finish_reason is not None:
            parts = self._parser.finish()
            if parts or self._open[0]:
                self._tell(parts)
            found += parts
        return found

    def _tell(self, parts: Sequence[Part]) -> None:
        """Add the open tokens, with the text that they complete."""
        ids, sources = self._open
        texts = {
            name: "".join([part.text for part in parts if isinstance(part, kind)])
            for kind, name in _FIELDS
            if any(isinstance(part, kind) for part in parts)
        }
        self._told.append({"ids": ids, "sources": sources, **texts})
        self._open = [], []


def sources_of(written: Written) -> list[str]:
    """Return the source of each token of an output: `drafter`, `resampled`, `lookup`, `bonus` or `plain`."""
    step = recorded(written.output.step)
    own = PLAIN if step is None or len(step.tokens) == 1 else BONUS
    return [own if piece.origin is Origin.VERIFIER else str(piece.origin) for piece in written.pieces]


def tree_of(step: StepRecord | None, texts: TokenTexts) -> dict[str, Any] | None:
    """Return the draft tree of a step as arrays of its nodes, parents first; None for a step without a draft.

    tokens, texts: of the nodes. The first one is the last token before the step.   parents: -1 for the first.
    sources:       of the nodes; null for the first.
    probs:         joint probabilities by the drafter, or estimates of a lookup.
    path:          accepted nodes, without the first.   drafters: ids of those that drafted in this step.
    bonus:         id and text of the verifier's token after the path; null if none may follow.
    """
    if step is None or len(step.tokens) == 1:
        return None
    return {
        "tokens": list(step.tokens),
        "texts": [texts.of(token).text for token in step.tokens],
        "parents": list(step.parents),
        "sources": [None, *map(str, step.nodes)],
        "probs": [round(prob, 4) for prob in np.exp(np.minimum(step.log_probs, 0.0)).tolist()],
        "path": list(step.path),
        "drafters": list(step.drafters),
        "bonus": None if step.bonus == NOT_REACHED else {"id": step.bonus, "text": texts.of(step.bonus).text},
    }
