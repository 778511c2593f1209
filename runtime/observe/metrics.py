"""Counts and times, per request and per runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Clock:
    """Seconds spent decoding since the runtime was opened, by stage. A request's times are differences of two readings.

    draft, resample: making trees, a drafter's own engine calls included.   verify: inside the verifier's engine call.
    total:           whole steps.   engine: inside any engine call.
    """

    draft: float = 0.0
    resample: float = 0.0
    verify: float = 0.0
    engine: float = 0.0
    total: float = 0.0

    def copy(self) -> Clock:
        """Return a copy of the current readings."""
        return Clock(self.draft, self.resample, self.verify, self.engine, self.total)


@dataclass(slots=True)
class Counters:
    """Counts of one request.

    histogram[k]: speculative steps that accepted k drafted tokens.
    sizes[n]:     steps that verified n nodes, root included.
    """

    steps: int = 0
    spec_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """Record one verification of `drafted` nodes, of which `accepted` were accepted."""
        self.steps += 1
        while len(self.sizes) <= drafted + 1:
            self.sizes.append(0)
        self.sizes[drafted + 1] += 1
        if drafted:
            self.spec_steps += 1
            self.drafted += drafted
            self.accepted += accepted
            while len(self.histogram) <= accepted:
                self.histogram.append(0)
            self.histogram[accepted] += 1


@dataclass(frozen=True)
class Metrics:
    """Metrics of one finished request.

    num_steps:                 verification steps; num_spec_steps of them verified at least one drafted token.
    mean_acceptance_length:    tokens per verification step, the bonus included; 1 if no draft is accepted.
    draft_acceptance_rate:     accepted over drafted tokens.
    acceptance_histogram:      entry k: speculative steps that accepted k drafted tokens.
    decode_tokens_per_second:  tokens over the time of their steps, without those of the prompt.
    overhead_fraction:         share of that time outside engine calls.
    stage_ms:                  that time by stage; `host` is the rest.
    size_histogram:            entry n: steps that verified n nodes, the root included.
    synthetic:                 acceptance was forced: the speed is real, the text is not.
    """

    num_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    decode_tokens_per_second: float
    time_to_first_token_ms: float
    overhead_fraction: float
    stage_ms: dict[str, float]
    synthetic: bool = False
    size_histogram: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object. It has `synthetic` only if that is true."""
        values = dict(vars(self), acceptance_histogram=list(self.acceptance_histogram))
        values["size_histogram"] = list(self.size_histogram)
        if not self.synthetic:
            del values["synthetic"]
        return values


def summarise(
    counters: Counters, begin: Clock, end: Clock, decoded: int, first_token_seconds: float, synthetic: bool = False
) -> Metrics:
    """Return the metrics of a request that decoded `decoded` tokens between two clock readings."""
    total, engine = end.total - begin.total, end.engine - begin.engine
    stages = {name: (getattr(end, name) - getattr(begin, name)) * 1e3 for name in ("draft", "verify", "resample")}
    stages["host"] = max(total * 1e3 - sum(stages.values()), 0.0)
    return Metrics(
        num_steps=counters.steps,
        num_spec_steps=counters.spec_steps,
        num_draft_tokens=counters.drafted,
        num_accepted_draft_tokens=counters.accepted,
        mean_acceptance_length=1 + counters.accepted / counters.steps if counters.steps else 1.0,
        draft_acceptance_rate=counters.accepted / counters.drafted if counters.drafted else 0.0,
        acceptance_histogram=tuple(counters.histogram),
        decode_tokens_per_second=decoded / total if total > 0 else 0.0,
        time_to_first_token_ms=first_token_seconds * 1e3,
        overhead_fraction=1 - engine / total if total > 0 else 0.0,
        stage_ms=stages,
        synthetic=synthetic,
        size_histogram=tuple(counters.sizes),
    )
