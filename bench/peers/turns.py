"""Turns: every decoder continues a prompt in every mode before the next prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from redraft.bench.compare import PLAIN as OUR_PLAIN
from redraft.bench.compare import Settings, compare
from redraft.bench.peers.base import PeerError
from redraft.bench.peers.worker import Opened, Turn
from redraft.bench.prompts import Prompt
from redraft.bench.summary import FEWEST_TOKENS
from redraft.bench.turns import Report, in_turns
from redraft.config import Precision
from redraft.errors import DataError
from redraft.runtime import Runtime, SamplingParams

SETTLE_SECONDS = 0.1
"""Pause before a turn, until the threads of the decoder before stop spinning. onnxruntime-genai's spin for 0.03 s."""


@dataclass(frozen=True)
class Key:
    """A decoder: a library's name, and the precision of its model."""

    name: str
    precision: Precision

    def __str__(self) -> str:
        return f"{self.name} {self.precision}"


@dataclass(frozen=True)
class Way:
    """A decoder in one of its modes."""

    key: Key
    mode: str

    def __str__(self) -> str:
        return f"{self.key} {self.mode}"


@dataclass(frozen=True)
class Question:
    """A prompt, and the number of tokens with which every decoder continues it.

    answer: our plain continuation, which ends at an end token or at the largest number of new tokens.
    """

    prompt: Prompt
    token_ids: Sequence[int]
    answer: tuple[int, ...]

    @property
    def count(self) -> int:
        """New tokens of every decoder."""
        return len(self.answer)


class Taker(Protocol):
    """A decoder that takes turns: a `Worker`."""

    @property
    def opened(self) -> Opened: ...

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Turn:
        """See `Worker.decode`."""
        ...


@dataclass
class Results:
    """Turns by decoder and mode, one for each question. Decoders that failed have none, but a reason."""

    turns: dict[Key, dict[str, list[Turn]]]
    failed: dict[Key, str] = field(default_factory=dict)

    def fail(self, key: Key, error: PeerError) -> None:
        """Leave a decoder out."""
        self.turns.pop(key, None)
        self.failed[key] = str(error)


def make_questions(
    runtime: Runtime, prompts: Sequence[Prompt], max_new_tokens: int, chat: bool, system: str | None
) -> tuple[Question, ...]:
    """Return the first turns of prompts with our plain answers, without those of under FEWEST_TOKENS tokens.

    chat: True puts each prompt into the bundle's chat template, after the message `system` if there is one.
    Raises UsageError naming a prompt that fills the context, and DataError if no answer is long enough.
    """
    first_turns = [replace(prompt, later_turns=()) for prompt in prompts]
    settings = Settings(SamplingParams(max_tokens=max_new_tokens), chat=chat, system=system)
    runs = compare(runtime, first_turns, (), settings)
    questions = [Question(run.prompt, run.token_ids, run.generations[OUR_PLAIN].token_ids) for run in runs]
    long = tuple(question for question in questions if question.count >= FEWEST_TOKENS)
    if not long:
        raise DataError(f"no answer has {FEWEST_TOKENS} tokens", "give other prompts, or a larger --max-new-tokens")
    return long


def take_turns(takers: Mapping[Key, Taker], questions: Sequence[Question], report: Report) -> Results:
    """Decode every question by every decoder in each of its modes, after a warm-up on the first question."""
    results = Results({key: {mode: [] for mode in taker.opened.modes} for key, taker in takers.items()})
    ways = [Way(key, mode) for key, modes in results.turns.items() for mode in modes]
    kinds = [question.prompt.kind for question in questions]
    orders = in_turns(ways, kinds, lambda way: _turn(takers, way, questions[0], results), report)
    for question, order in zip(questions, orders, strict=True):
        for way in order:
            time.sleep(SETTLE_SECONDS)
            if turn := _turn(takers, way, question, results):
                results.turns[way.key][way.mode].append(turn)
    return results


def _turn(takers: Mapping[Key, Taker], way: Way, question: Question, results: Results) -> Turn | None:
    """Return a decoder's turn, or None if it has failed, now or before."""
    if way.key in results.failed:
        return None
    try:
        return takers[way.key].decode(way.mode, question.token_ids, question.count)
    except PeerError as error:
        results.fail(way.key, error)
        return None
