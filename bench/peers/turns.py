"""Turns: every decoder continues a prompt in every mode before the next prompt."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from redraft.bench.compare import FEWEST_TOKENS, Progress, Run, Settings, compare, in_turns
from redraft.bench.peers.base import Decoded, PeerError
from redraft.bench.peers.worker import Turn, Worker
from redraft.bench.prompts import BenchPrompt
from redraft.config import Precision
from redraft.errors import DataError
from redraft.runtime import Runtime, SamplingParams

SETTLE_SECONDS = 0.1
"""Pause before a turn, until the threads of the decoder before stop spinning. onnxruntime-genai's spin for 0.03 s."""


class Key(NamedTuple):
    """A decoder: a library's name, and the precision of its model."""

    name: str
    precision: Precision

    def __str__(self) -> str:
        return f"{self.name} {self.precision}"


T = TypeVar("T")


@dataclass
class Results(Generic[T]):
    """Turns by decoder and mode, one for each question. Decoders that failed have none, but a reason."""

    turns: dict[Key, dict[str, list[Turn[T]]]]
    failed: dict[Key, str] = field(default_factory=dict)

    def fail(self, key: Key, error: PeerError) -> None:
        """Forget the turns of a decoder that failed."""
        del self.turns[key]
        self.failed[key] = str(error)


def make_questions(
    runtime: Runtime, prompts: Sequence[BenchPrompt], max_new_tokens: int, chat: bool, system: str | None
) -> list[Run]:
    """Return the first turns of prompts with our plain answers, without those of under FEWEST_TOKENS tokens.

    An answer ends at an end token or at the largest number of new tokens. Every decoder writes as many.
    chat: True puts each prompt into the bundle's chat template, after the message `system` if there is one.
    Raises UsageError naming a prompt that fills the context, and DataError if no answer is long enough.
    """
    first_turns = [replace(prompt, later_turns=()) for prompt in prompts]
    settings = Settings(SamplingParams(max_tokens=max_new_tokens), chat=chat, system=system)
    questions = [run for run in compare(runtime, first_turns, (), settings) if run.timed]
    if not questions:
        raise DataError(f"no answer has {FEWEST_TOKENS} tokens", "give other prompts, or a larger --max-new-tokens")
    return questions


def take_turns(workers: Mapping[Key, Worker], questions: Sequence[Run], progress: Progress) -> Results[Decoded]:
    """Decode every question by every decoder in each of its modes, after a warm-up on the first question."""
    results: Results[Decoded] = Results({key: {mode: [] for mode in worker.modes} for key, worker in workers.items()})
    modes = {f"{key} {mode}": (key, mode) for key, turns in results.turns.items() for mode in turns}

    def turn_of(name: str, question: Run) -> Turn[Decoded] | None:
        """Return a decoder's turn, or None if it has failed, now or before."""
        key, mode = modes[name]
        if key in results.failed:
            return None
        try:
            return workers[key].decode(mode, question.token_ids, len(question.answer))
        except PeerError as error:
            results.fail(key, error)
            return None

    kinds = [question.prompt.kind for question in questions]
    orders = in_turns(list(modes), kinds, lambda name: turn_of(name, questions[0]), progress)
    for question, order in zip(questions, orders, strict=True):
        for name in order:
            time.sleep(SETTLE_SECONDS)
            if turn := turn_of(name, question):
                key, mode = modes[name]
                results.turns[key][mode].append(turn)
    return results
