"""The speed that a tree's acceptance and the cost of its verification allow.

A step that verifies n tokens (the root included) commits τ of them and costs t(n) plus drafting. Plain decoding commits
one token for t(1). No speculation can be faster than τ·t(1) / (t(n) + draft) times plain decoding. Here t(n) and the
cost of drafting are means over the sizes that the steps really had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redraft.bench.compare import PLAIN, Run, timing
from redraft.bench.statistics import rate_of, speedup


def achieved(runs: list[Run], method: str, table_ms: Sequence[float]) -> dict[str, Any]:
    """Return the reached speed, its bound and their ratio, over all runs; `table_ms[n]` is t(n)."""
    metrics = [run.generations[method].metrics for run in runs]
    steps = sum(m.num_steps for m in metrics)
    acceptance = 1 + sum(m.num_accepted_draft_tokens for m in metrics) / steps
    drafting_ms = sum(m.stage_ms["draft"] + m.stage_ms["resample"] for m in metrics) / steps
    spent = sum(count * table_ms[n] for m in metrics for n, count in enumerate(m.size_histogram) if count)
    one_ms, many_ms = table_ms[1], spent / steps
    plain, drafted = ([timing(run.generations[name]) for run in runs] for name in (PLAIN, method))
    reached = speedup(plain, drafted)
    bound = speed_bound(acceptance, one_ms, many_ms, drafting_ms)
    return {
        "mean_acceptance_length": acceptance,
        "verification_ms": {"one": one_ms, "step": many_ms},
        "draft_ms": drafting_ms,
        "speedup": reached.ratio,
        "speedup_interval": reached.to_json()["interval"],
        "bound": bound,
        "share_of_bound": reached.ratio / bound,
        "prompts": len(runs),
    }


def overall_rate(runs: list[Run], method: str) -> float:
    """Return tokens a second over all prompts together, as τ is a mean over all steps together."""
    return rate_of([timing(run.generations[method]) for run in runs])


def speed_bound(acceptance_length: float, one_ms: float, many_ms: float, draft_ms: float) -> float:
    """Return τ·t(1) / (t(n) + draft)."""
    return acceptance_length * one_ms / (many_ms + draft_ms)
