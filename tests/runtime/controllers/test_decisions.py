"""Decisions from costs that are wrong at first. After 200 steps they equal those of a runtime with correct costs.

Time is the test's own clock, which every engine call advances by its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest

from redraft.engines.device import Buffer, Run
from redraft.runtime.api import GREEDY
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import Controller, FixedBudget
from redraft.runtime.controllers.cost import CostCurve, VerifyCosts
from redraft.runtime.drafters import Drafter
from redraft.runtime.drafters.ngram import NgramDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.observe import profiling
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling import make_sampler
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION
from tests.runtime.fakes import FakeEngine, fake_verifier

CHEAP = CostCurve.from_points({1: 10.0, 2: 10.5, 4: 11.5, 8: 13.5, 16: 19.0, 32: 30.0})
DEAR = CostCurve.from_points({1: 10.0, 2: 19.0, 4: 37.0, 8: 73.0, 16: 145.0, 32: 289.0})
PLANTED: dict[str, Callable[[CostCurve], CostCurve]] = {
    "three times as slow": lambda true: CostCurve(tuple(3 * ms for ms in true.table_ms)),
    "three times as fast": lambda true: CostCurve(tuple(ms / 3 for ms in true.table_ms)),
    "one row slow": lambda true: CostCurve(tuple(max(ms, 30.0) if n else 0.0 for n, ms in enumerate(true.table_ms))),
    "the other's": lambda true: DEAR if true is CHEAP else CHEAP,
    "six times as dear from four nodes on": lambda true: _dearer(true, 4, 6),
    "six times as dear from six nodes on": lambda true: _dearer(true, 6, 6),
    "a hundred times as dear from two nodes on": lambda true: _dearer(true, 2, 100),
    "flat": lambda true: CostCurve(tuple(10.0 if n else 0.0 for n in range(len(true.table_ms)))),
}


def _dearer(true: CostCurve, nodes: int, times: float) -> CostCurve:
    return CostCurve(tuple(ms * times if n >= nodes else ms for n, ms in enumerate(true.table_ms)))


STEPS = 200
PLAIN_MS = 1.05 * CHEAP.table_ms[1]
"""Mean of a call of one row: every twentieth call takes twice as long."""


class Clock:
    """Seconds that pass only in engine calls, and a little at every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 2e-6
        return self.now


class Costly(FakeEngine):
    """Calls take the time of a curve, and every twentieth takes twice that."""

    def __init__(self, clock: Clock, true: CostCurve, rule: Callable[[list[int]], int]) -> None:
        super().__init__(rule)
        self.clock = clock
        self.true = true
        self.random = np.random.default_rng(0)

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        run, width = super().bind(buffers), buffers["token_ids"].shape[1]

        def timed() -> None:
            run()
            noise = self.random.uniform(0.95, 1.05) * (2 if self.random.random() < 0.05 else 1)
            self.clock.now += self.true.table_ms[min(width, 32)] * 1e-3 * noise

        return timed


def sometimes_repeating(tokens: list[int]) -> int:
    """Repeats a phrase of eight tokens, with other tokens in every third block of 24."""
    place = len(tokens)
    return 97 + (place % 8 if place // 24 % 3 else (place * 2654435761 >> 7) % 23)


@cache
def milliseconds_a_token(true: CostCurve, believed: CostCurve, tokens: int = 400) -> float:
    """Return milliseconds a token after the first STEPS steps of a runtime with these initial costs."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "time", clock)
        return _milliseconds_a_token(clock, true, believed, tokens)


def _milliseconds_a_token(clock: Clock, true: CostCurve, believed: CostCurve, tokens: int) -> float:
    engine = Costly(clock, true, sometimes_repeating)
    verifier = fake_verifier(engine, 2000)
    costs = VerifyCosts({1: believed})
    loop = DecodeLoop(verifier, Speculation(NgramDrafter(verifier), Adaptive(costs)), costs)
    prompt = [97 + n % 8 for n in range(30)]
    request = Request(list(prompt), len(prompt), 1900, frozenset(), make_sampler(GREEDY))
    began = 0, 0.0
    loop.add(request)
    for steps in range(1_000_000):
        loop.step()
        if steps == STEPS:
            began = len(request.tokens), clock.now
        elif steps > STEPS and len(request.tokens) - began[0] >= tokens:
            break
    return (clock.now - began[1]) * 1e3 / (len(request.tokens) - began[0])


@pytest.mark.parametrize(
    ("true", "planted"),
    [*[(CHEAP, name) for name in PLANTED], *[(DEAR, name) for name in ("three times as slow", "the other's", "flat")]],
    ids=lambda value: value if isinstance(value, str) else "cheap" if value is CHEAP else "dear",
)
def test_a_wrong_curve_is_corrected_within_200_steps(true: CostCurve, planted: str) -> None:
    at_rest = milliseconds_a_token(true, true)
    assert milliseconds_a_token(true, PLANTED[planted](true)) < 1.05 * at_rest
    assert at_rest < 1.05 * PLAIN_MS


def test_plain_decoding_is_not_slowed_if_drafting_takes_longer_than_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a tenth of a millisecond, a lookup half of that, and an eighth of its tokens are correct.

    By verification costs alone, speculation would seem to pay.
    """
    true, clock = CostCurve(tuple(ms / 100 for ms in CHEAP.table_ms)), Clock()
    monkeypatch.setattr(profiling, "time", clock)

    class Slow(NgramDrafter):
        def offers(self, *arguments: object) -> object:
            clock.now += 50e-6
            return super().offers(*arguments)  # type: ignore[arg-type]

    def spent(controller: Controller, drafter: type[Drafter]) -> float:
        engine = Costly(clock, true, lambda tokens: 97 + int(np.random.default_rng(len(tokens)).integers(8)))
        verifier = fake_verifier(engine, 2000)
        loop = DecodeLoop(verifier, Speculation(drafter(verifier), controller))
        request = Request([97] * 8, 8, 1508, frozenset(), make_sampler(GREEDY))
        began = clock.now
        loop.run([request])
        return clock.now - began

    plain = spent(FixedBudget(NO_SPECULATION), NoDrafter)
    assert spent(Adaptive(VerifyCosts({1: true})), Slow) < 1.05 * plain
