"""Plain and speculative decoding of the same prompts, taking turns in one process.

Every method decodes a prompt before the next prompt. A chat is decoded turn by turn. All methods continue the same
messages: the assistant's are the plain answers. A chat that outgrows the context ends there.

INEXACT is plain decoding by a second runtime, opened with `exact=False`. It measures the cost of exact texts.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from redraft.bench.prompts import BenchPrompt
from redraft.bench.statistics import Speedup, Timing, loops, speedup
from redraft.errors import UsageError
from redraft.runtime import Budget, Generation, Runtime, SamplingParams, SpeculationParams
from redraft.runtime.conversation import Conversation, ConversationTooLong

PLAIN, INEXACT = "none", "inexact"
FEWEST_TOKENS = 8
"""Shorter outputs are too short to time and take no part in ratios."""
STAGES = ("draft", "resample", "verify", "host")
"""Stages of a step in `Metrics.stage_ms`; `host` is the rest."""
Progress = Callable[[str], None]
"""Receives one line of progress."""
Trace = tuple[list[str], list[int]]
"""The lines of a trace, none for one token, and the tokens of prompt and output."""
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One prompt, or one turn of a chat, decoded by every method.

    token_ids:   tokens that every method continued: the prompt's, or those of the chat until here.
    generations: by method, PLAIN among them.
    turn:        of the prompt, counted from 1.
    """

    prompt: BenchPrompt
    token_ids: Sequence[int]
    generations: dict[str, Generation]
    turn: int = 1

    @property
    def answer(self) -> tuple[int, ...]:
        """The plain output."""
        return self.generations[PLAIN].token_ids

    @property
    def loops(self) -> bool:
        """True if the plain output ends in a loop."""
        return loops(self.answer)

    @property
    def timed(self) -> bool:
        """True if every output is long enough to time."""
        return min(len(each.token_ids) for each in self.generations.values()) >= FEWEST_TOKENS


@dataclass(frozen=True)
class Settings:
    """Settings that every generation of a comparison shares.

    acceptance: forced by depth on every method but PLAIN; speeds are real then, texts are not.
    chat:       every prompt is a conversation of all its turns. Otherwise its first turn is the whole prompt.
    system:     message that begins every conversation.   controller: of every method but PLAIN.
    ways:       speculation of each name in the comparison that is no method.
    """

    params: SamplingParams
    budget: Budget | None = None
    acceptance: tuple[float, ...] | None = None
    chat: bool = False
    system: str | None = None
    controller: str | None = None
    ways: Mapping[str, SpeculationParams] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Sums over generations. tokens, seconds: after each first token.   overhead: seconds outside engine calls."""

    tokens: int
    seconds: float
    overhead: float
    steps: int
    drafts: int
    drafted: int
    accepted: int
    stage_ms: Mapping[str, float]

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Totals:
        """Return the sums over generations."""
        listed = list(generations)
        metrics = [one.metrics for one in listed]
        timings = [timing(one) for one in listed]
        return cls(
            tokens=sum(one.tokens for one in timings),
            seconds=sum(one.seconds for one in timings),
            overhead=sum(m.overhead_fraction * one.seconds for m, one in zip(metrics, timings, strict=True)),
            steps=sum(m.num_steps for m in metrics),
            drafts=sum(m.num_spec_steps for m in metrics),
            drafted=sum(m.num_draft_tokens for m in metrics),
            accepted=sum(m.num_accepted_draft_tokens for m in metrics),
            stage_ms={stage: sum(m.stage_ms.get(stage, 0.0) for m in metrics) for stage in STAGES},
        )

    @property
    def timing(self) -> Timing:
        """The tokens, and the seconds of their steps."""
        return Timing(self.tokens, self.seconds)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def tau(self) -> float:
        """τ, the tokens of a step with the verifier's own; 1 without steps."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def acceptance(self) -> float:
        """α, the share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def draft_length(self) -> float:
        """Mean drafted tokens of a draft."""
        return self.drafted / self.drafts if self.drafts else 0.0

    @property
    def drafting_ms(self) -> float:
        """Time of drafting and resampling."""
        return self.stage_ms["draft"] + self.stage_ms["resample"]


class Flips:
    """Orders of turns, which flip from prompt to prompt of a kind, since kinds take turns too.

    So slow minutes of the machine, and caches that one method warms for the next, affect all methods equally.
    """

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()

    def order(self, kind: Hashable, ways: Sequence[T]) -> Sequence[T]:
        """Return the ways as given for the first prompt of a kind, reversed for the second, and so on."""
        self._seen[kind] += 1
        return ways if self._seen[kind] % 2 else ways[::-1]


def in_turns(
    ways: Sequence[T], kinds: Sequence[str], warm_up: Callable[[T], object], progress: Progress
) -> Iterator[Sequence[T]]:
    """Warm up every way, which is not counted. Then yield the order of the ways for each prompt, given by its kind."""
    for way in ways:
        progress(f"warming up {way}")
        warm_up(way)
    flips = Flips()
    for number, kind in enumerate(kinds, start=1):
        progress(f"prompt {number} of {len(kinds)}")
        yield flips.order(kind, ways)


def compare(
    runtime: Runtime,
    prompts: Sequence[BenchPrompt],
    methods: Sequence[str],
    settings: Settings,
    progress: Progress = lambda line: None,
    inexact: Runtime | None = None,
) -> list[Run]:
    """Decode every prompt by PLAIN and by every method, after a warm-up that is not counted.

    inexact: runtime that decodes for INEXACT.
    Raises UsageError naming the prompt if it cannot be decoded; for a first turn, before anything is decoded.
    """
    first_turns = [first_turn(runtime, prompt, settings) for prompt in prompts]

    def decode_by(method: str, ids: Sequence[int]) -> Generation:
        if method != INEXACT:
            return decode(runtime, ids, method, settings)
        assert inexact is not None
        return decode(inexact, ids, PLAIN, settings)

    kinds, all_methods = [prompt.kind for prompt in prompts], list(dict.fromkeys((PLAIN, *methods)))
    orders = in_turns(all_methods, kinds, lambda method: decode_by(method, first_turns[0]), progress)
    runs: list[Run] = []
    for prompt, order in zip(prompts, orders, strict=True):
        conversation = Conversation(runtime, settings.system) if settings.chat else None
        for turn, text in enumerate(prompt.turns if conversation else prompt.turns[:1], start=1):
            try:
                ids = _asked(runtime, prompt, conversation, text, turn)
            except ConversationTooLong:
                break
            runs.append(Run(prompt, ids, {method: decode_by(method, ids) for method in order}, turn))
            if conversation:
                conversation.answer(runs[-1].generations[PLAIN].text)
    return runs


def decode(runtime: Runtime, prompt: str | Sequence[int], method: str, settings: Settings) -> Generation:
    """Decode once, with all rows of the prompt; acceptance is never forced on PLAIN."""
    forced = None if method == PLAIN else settings.acceptance
    runtime.forget_prefixes()
    return checked(runtime.generate([prompt], settings.params, speculation(method, settings), forced)[0])


def checked(generation: Generation) -> Generation:
    """Return it, or raise why its drafter failed: it went on plainly, so that its time is not that of its method."""
    if generation.drafting_error is not None:
        raise generation.drafting_error
    return generation


def trace(runtime: Runtime, token_ids: Sequence[int], params: SamplingParams, how: SpeculationParams) -> Trace:
    """Decode once, and return the trace."""
    file = io.StringIO()
    generation = checked(runtime.generate([token_ids], params, how, trace=file)[0])
    return file.getvalue().splitlines(), [*token_ids, *generation.token_ids]


def timing(generation: Generation) -> Timing:
    """Return the tokens, and the wall time of the steps that made them."""
    tokens, rate = len(generation.token_ids), generation.metrics.decode_tokens_per_second
    return Timing(tokens, tokens / rate if rate else 0.0)


def times_as_fast(runs: Sequence[Run], ways: Sequence[str], base: Sequence[str] = (PLAIN,)) -> Speedup:
    """Return how many times as fast some ways together are as others.

    Turns of a conversation depend on each other, so the interval is over conversations.
    """
    others, own = ([Totals.of(run.generations[way] for way in some).timing for run in runs] for some in (base, ways))
    return speedup(others, own, [run.prompt for run in runs])


def totals_of(runs: Sequence[Run], way: str) -> Totals:
    """Return the sums of one way over runs."""
    return Totals.of(run.generations[way] for run in runs)


def by_kind(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each kind of prompt."""
    return {kind: [run for run in runs if run.prompt.kind == kind] for kind in sorted({r.prompt.kind for r in runs})}


def speculation(method: str, settings: Settings) -> SpeculationParams:
    """Return how a method, or a way that the settings name, decodes."""
    if method == PLAIN:
        return SpeculationParams(PLAIN)
    named = settings.ways.get(method)
    return named or SpeculationParams(method, budget=settings.budget, controller=settings.controller)


def first_turn(runtime: Runtime, prompt: BenchPrompt, settings: Settings) -> list[int]:
    """Return token ids of a prompt, or of the first turn of a chat."""
    return _asked(runtime, prompt, Conversation(runtime, settings.system) if settings.chat else None, prompt.text)


def _asked(
    runtime: Runtime, prompt: BenchPrompt, conversation: Conversation | None, text: str, turn: int = 0
) -> list[int]:
    """Return token ids of a text, or of the conversation that it continues.

    turn: its number, or 0. The message of a UsageError begins with the name of the prompt, and a chat's turn.
    """
    try:
        return conversation.ask(text) if conversation else runtime.encode(text)
    except UsageError as error:
        name = f"prompt {prompt.id}, turn {turn}" if conversation and turn else f"prompt {prompt.id}"
        raise type(error)(f"{name}: {error.message}", error.hint) from error
