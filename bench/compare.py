"""Plain and speculative decoding of the same prompts, taking turns in one process.

Every method decodes a prompt before the next prompt, in the order of `redraft.bench.turns`. A chat is decoded turn by
turn. All methods continue the same messages: the assistant's are the plain answers. A chat that outgrows the context
ends there.

INEXACT is plain decoding by a second runtime, opened with `exact=False`. It measures the cost of exact texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from redraft.bench.prompts import Prompt
from redraft.bench.statistics import Timing, loops
from redraft.bench.turns import Report, in_turns
from redraft.errors import UsageError
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.conversation import Conversation, ConversationTooLong

PLAIN, INEXACT = "none", "inexact"


@dataclass(frozen=True)
class Run:
    """One prompt, or one turn of a chat, decoded by every method.

    token_ids:   that every method continued: of the prompt, or of the chat until here.
    generations: by method, PLAIN among them.
    turn:        of the prompt, counted from 1.
    """

    prompt: Prompt
    token_ids: Sequence[int]
    generations: dict[str, Generation]
    turn: int = 1

    @property
    def loops(self) -> bool:
        """True if the plain output ends in a loop."""
        return loops(self.generations[PLAIN].token_ids)


@dataclass(frozen=True)
class Settings:
    """Settings that every generation of a comparison shares.

    controller: of every method but PLAIN; None is the default one.
    ways:       speculation of each name in the comparison that is no method.
    acceptance: forced by depth on every method but PLAIN; speeds are real then, texts are not.
    chat:       every prompt is a conversation of all its turns. Otherwise its first turn is the whole prompt.
    system:     message that begins every conversation, None for no such message.
    """

    params: SamplingParams
    budget: Budget | None = None
    acceptance: tuple[float, ...] | None = None
    chat: bool = False
    system: str | None = None
    controller: str | None = None
    ways: Mapping[str, SpeculationParams] = field(default_factory=dict)


def compare(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    settings: Settings,
    report: Report = lambda message: None,
    inexact: Runtime | None = None,
) -> list[Run]:
    """Decode every prompt by PLAIN and by every method, after a warm-up that is not counted.

    inexact: runtime that decodes for INEXACT.
    Raises UsageError naming the prompt if it cannot be decoded; for a first turn, before anything is decoded.
    """
    order = list(dict.fromkeys((PLAIN, *methods)))
    first_turns = [first_turn(runtime, prompt, settings) for prompt in prompts]

    def decode_by(method: str, ids: Sequence[int]) -> Generation:
        if method != INEXACT:
            return decode(runtime, ids, method, settings)
        assert inexact is not None
        return decode(inexact, ids, PLAIN, settings)

    orders = in_turns(order, [p.kind for p in prompts], lambda method: decode_by(method, first_turns[0]), report)
    runs: list[Run] = []
    for prompt, turn_order in zip(prompts, orders, strict=True):
        runs += _decode_turns(runtime, prompt, settings, partial(_by_each, decode_by, turn_order))
    return runs


def _by_each(
    decode_by: Callable[[str, Sequence[int]], Generation], methods: Sequence[str], ids: Sequence[int]
) -> dict[str, Generation]:
    return {method: decode_by(method, ids) for method in methods}


def decode(runtime: Runtime, prompt: str | Sequence[int], method: str, settings: Settings) -> Generation:
    """Decode once; acceptance is never forced on PLAIN."""
    forced = None if method == PLAIN else settings.acceptance
    return runtime.generate([prompt], settings.params, speculation(method, settings), forced)[0]


def timing(generation: Generation) -> Timing:
    """Return the tokens after the first, and the wall time of the steps that made them."""
    tokens = len(generation.token_ids) - 1
    return Timing(tokens, tokens / generation.metrics.decode_tokens_per_second)


def speculation(method: str, settings: Settings) -> SpeculationParams:
    """Return how a method, or a way that the settings name, decodes."""
    if method == PLAIN:
        return SpeculationParams(PLAIN)
    named = settings.ways.get(method)
    return named or SpeculationParams(method, budget=settings.budget, controller=settings.controller)


def first_turn(runtime: Runtime, prompt: Prompt, settings: Settings) -> list[int]:
    """Return token ids of a prompt, or of the first turn of a chat."""
    conversation = Conversation(runtime, settings.system) if settings.chat else None
    with _named(f"prompt {prompt.id}"):
        return conversation.ask(prompt.text) if conversation else runtime.encode(prompt.text)


def _decode_turns(
    runtime: Runtime,
    prompt: Prompt,
    settings: Settings,
    decode_by_all: Callable[[Sequence[int]], dict[str, Generation]],
) -> Iterator[Run]:
    """Yield a run of a prompt, or of every turn of a chat that fits the context."""
    if not settings.chat:
        ids = first_turn(runtime, prompt, settings)
        yield Run(prompt, ids, decode_by_all(ids))
        return
    conversation = Conversation(runtime, settings.system)
    for turn, text in enumerate(prompt.turns, start=1):
        try:
            with _named(f"prompt {prompt.id}, turn {turn}"):
                ids = conversation.ask(text)
        except ConversationTooLong:
            return
        run = Run(prompt, ids, decode_by_all(ids), turn)
        conversation.answer(run.generations[PLAIN].text)
        yield run


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Begin the message of a UsageError with the name of the prompt."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{name}: {error.message}", error.hint) from error
