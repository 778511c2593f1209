"""Plain and speculative decoding of the same prompts, taking turns in one process.

Every prompt is decoded by every method before the next prompt, in an order that flips from prompt to prompt, so that a
slow minute of the machine, and the caches that one method warms for the next, fall on all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redraft.bench.prompts import Prompt
from redraft.runtime import Budget, Generation, Runtime, SamplingParams

PLAIN = "none"


@dataclass(frozen=True)
class Run:
    """One prompt decoded by every method: `generations` by method, PLAIN among them."""

    prompt: Prompt
    generations: dict[str, Generation]


@dataclass(frozen=True)
class Settings:
    """What every generation of a comparison shares.

    acceptance: forced by depth on every method but PLAIN; speeds are real then, texts are not.
    """

    params: SamplingParams
    budget: Budget | None = None
    acceptance: tuple[float, ...] | None = None


def compare(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    settings: Settings,
    report: Callable[[str], None] = lambda message: None,
) -> list[Run]:
    """Decode every prompt by PLAIN and by every method, after a warm-up that is not counted."""
    order = list(dict.fromkeys((PLAIN, *methods)))
    for method in order:
        report(f"warming up {method}")
        decode(runtime, prompts[0], method, settings)
    runs = []
    for index, prompt in enumerate(prompts):
        report(f"prompt {index + 1} of {len(prompts)}")
        turn = order if index % 2 == 0 else order[::-1]
        runs.append(Run(prompt, {method: decode(runtime, prompt, method, settings) for method in turn}))
    return runs


def decode(runtime: Runtime, prompt: Prompt, method: str, settings: Settings) -> Generation:
    """One generation; acceptance is never forced on PLAIN."""
    forced = None if method == PLAIN else settings.acceptance
    budget = None if method == PLAIN else settings.budget
    return runtime.generate([prompt.text], settings.params, method, budget, forced)[0]
