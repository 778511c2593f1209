"""Generations and runs whose figures are given."""

from __future__ import annotations

from redraft.bench.compare import Run
from redraft.bench.prompts import BenchPrompt
from redraft.runtime import Generation
from redraft.runtime.observe.metrics import Metrics

TOKENS = tuple(range(12))
LOOP = (1, 2) * 32


def make_generation(
    rate: float = 100.0, steps: int = 12, drafted: int = 0, accepted: int = 0, tokens: tuple[int, ...] = TOKENS,
    drafts: int | None = None, draft_ms: float = 0.0, verify_ms: float = 0.0, host_ms: float = 0.0,
    sizes: tuple[int, ...] = (),
) -> Generation:  # fmt: skip
    """A generation with these counts and times; a tenth of its time is overhead. drafts: every step by default."""
    stage_ms = {"draft": draft_ms, "resample": 0.0, "verify": verify_ms, "host": host_ms}
    count = drafts if drafts is not None else steps if drafted else 0
    metrics = Metrics(steps, count, drafted, accepted, 1.0, 0.0, (), rate, 1.0, 0.1, stage_ms, size_histogram=sizes)
    return Generation("", tokens, "length", 20, metrics)


def make_run(number: int = 0, kind: str = "a", **generations: Generation) -> Run:
    """A run of a prompt; plain decoding has 100 tokens a second."""
    return Run(BenchPrompt(str(number), kind, ""), [1], {"none": make_generation(), **generations})
