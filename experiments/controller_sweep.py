"""A sweep of the GammaTune options that the paper does not give: η, δ, γ_min, γ_max and the threshold.

    python -m experiments.controller_sweep --engines DIR --prompts FILE … --chat --method ID [--stops-save]

Every prompt is decoded once with the longest drafts of the paper. From then on nothing is timed: a drafter that sees
tokens only would have drafted the rest of the same chain at each position inside an accepted one, so the recorded
chains give the outcome of a shorter draft at every position of the text. Each setting is replayed over these positions
from each first length of the paper. A step costs the verifier's measured time for its tokens, and the drafter's
measured time for the draft's length. Drafters that read hidden states would draft slightly other chains inside an
accepted one; for them the sweep is an estimate.

The result lists the settings by mean tokens a second over the first lengths, with their deviation, next to the other
rules. `best` has the best value of each option, every other option being free.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import exp
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np

from redraft.bench.command import bundle_parser, run
from redraft.bench.compare import Settings, first_turn
from redraft.bench.controllers import PAPER_LENGTHS
from redraft.bench.environment import environment
from redraft.bench.prompts import load_prompts
from redraft.errors import UsageError
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.rules import Confidence, GammaTune, GammaTunePlus, Heuristic, LengthRule, Svip
from redraft.runtime.drafters import split_pair

GRID: dict[str, Sequence[Any]] = {
    "eta": (0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
    "delta": (1, 2, 3, 4),
    "gamma_min": (1, 2, 3),
    "gamma_max": (8, 16, 24),
}
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
OTHERS: tuple[LengthRule, ...] = (LengthRule(), Heuristic(), Confidence(), Svip())
LISTED = 10
_TIMED_PROMPTS = 2


@dataclass(frozen=True)
class Position:
    """A position of a text: the probability of each token drafted there, and how many of them are right."""

    probs: tuple[float, ...]
    right: int


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a draft by its length, and of verifying n nodes, entry 0 of both being 0."""

    draft_ms: Sequence[float]
    verify_ms: Sequence[float]
    stops_save: bool = False

    def of(self, asked: int, drafted: int) -> float:
        """Return the milliseconds of a step that asked for a length and drafted so many tokens."""
        length = drafted if self.stops_save else asked
        return self.draft_ms[min(length, len(self.draft_ms) - 1)] + self.verify_ms[drafted + 1]


def main() -> dict[str, Any]:
    """Record the drafts of every prompt, and replay every setting."""
    options = _arguments()
    params = SamplingParams(max_tokens=options.max_new_tokens)
    settings = Settings(params, chat=options.chat)
    with Runtime.open(options.engines, threads=options.threads) as runtime:
        method = options.method or split_pair(runtime.default_method)[0]
        prompts = [first_turn(runtime, p, settings) for p in load_prompts(options.prompts, options.limit)]
        texts = [record(runtime, ids, params, method) for ids in prompts]
        draft_ms = draft_times(runtime, prompts[:_TIMED_PROMPTS], params, method)
        costs = StepCosts(draft_ms, runtime.costs.table_ms(1), options.stops_save)
    return {
        "method": method,
        "environment": environment(options.threads),
        "prompts": len(prompts),
        "positions": sum(map(len, texts)),
        "draft_ms": [round(ms, 3) for ms in draft_ms],
        "verify_ms": [round(ms, 3) for ms in costs.verify_ms],
        **sweep(lambda rule: score(rule, texts, costs)),
    }


def record(runtime: Runtime, prompt: Sequence[int], params: SamplingParams, method: str) -> list[Position]:
    """Return the positions of a text in order, from one run with the longest drafts."""
    file = io.StringIO()
    how = SpeculationParams(method, controller=f"fixed,gamma={PAPER_LENGTHS[-1]}")
    runtime.generate([prompt], params, how, trace=file)
    steps = [json.loads(line) for line in file.getvalue().splitlines()]
    return [position for step in steps if "position" in step for position in positions_of(step)]


def positions_of(step: dict[str, Any]) -> Iterator[Position]:
    """Yield the positions that a step of a trace passed: that of its root, then those of its accepted tokens."""
    probs = [exp(child - parent) for parent, child in pairwise(step["log_probs"])]
    right = len(step["path"])
    for passed in range(right + 1):
        yield Position(tuple(probs[passed:]), right - passed)


def draft_times(runtime: Runtime, prompts: Sequence[Sequence[int]], params: SamplingParams, method: str) -> list[float]:
    """Return the median milliseconds of a draft by length, interpolated between the lengths of the paper."""
    taken: list[float] = []
    for length in PAPER_LENGTHS:
        how = SpeculationParams(method, controller=f"fixed,gamma={length}")
        found = [runtime.generate([ids], params, how)[0].metrics for ids in prompts]
        spent = [(one.stage_ms["draft"] + one.stage_ms["resample"]) / one.num_spec_steps for one in found]
        taken.append(median(spent))
    return np.interp(range(PAPER_LENGTHS[-1] + 1), (0, *PAPER_LENGTHS), (0.0, *taken)).tolist()


def replay(rule: LengthRule, text: Sequence[Position], costs: StepCosts) -> float:
    """Return the milliseconds of decoding a text with a rule, each draft being as long as the rule says."""
    average, place, ms = float(rule.gamma), 0, 0.0
    while place < len(text):
        here, asked = text[place], rule.length(average)
        drafted = min(asked, len(here.probs))
        for number, prob in enumerate(here.probs[:drafted], 1):
            if prob < rule.confidence:
                drafted = number
                break
        accepted = min(here.right, drafted)
        ms += costs.of(asked, drafted)
        if drafted:
            average = rule.update(average, drafted, accepted)
        place += accepted + 1
    return ms


def score(rule: LengthRule, texts: Sequence[Sequence[Position]], costs: StepCosts) -> float:
    """Return tokens a second over all texts."""
    return 1e3 * sum(map(len, texts)) / sum(replay(rule, text, costs) for text in texts)


def sweep(score_of: Callable[[LengthRule], float]) -> dict[str, Any]:
    """Return the best settings of GammaTune and GammaTune+, and the other rules with their defaults."""
    plain = [GammaTune(**values) for values in _settings(GRID)]
    plus = [GammaTunePlus(**values) for values in _settings({**GRID, "threshold": THRESHOLDS})]
    found = {}
    for name, rules in (("gammatune", plain), ("gammatune+", plus)):
        ranked = sorted((_scored(rule, score_of) for rule in rules), key=_mean, reverse=True)
        free = GRID if rules is plain else {**GRID, "threshold": THRESHOLDS}
        found[name] = {
            "settings": len(rules),
            "first": ranked[:LISTED],
            "last": ranked[-1],
            "default": _scored(type(rules[0])(), score_of),
            "best": {key: {str(value): max(map(_mean, _with(ranked, key, value))) for value in free[key]}
                     for key in free},
        }  # fmt: skip
    return {**found, "others": [_scored(rule, score_of) for rule in OTHERS]}


def _settings(grid: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _scored(rule: LengthRule, score_of: Callable[[LengthRule], float]) -> dict[str, Any]:
    """Return a rule's options but the first length, and its mean and deviation over the first lengths."""
    options = asdict(rule)
    rates = [score_of(type(rule)(**{**options, "gamma": length})) for length in PAPER_LENGTHS]
    shown = {key: value for key, value in options.items() if key not in ("gamma", "width")}
    name = type(rule).__name__
    return {"rule": name, **shown, "tokens_per_second": fmean(rates), "deviation": pstdev(rates), "best": max(rates)}


def _mean(scored: dict[str, Any]) -> float:
    mean: float = scored["tokens_per_second"]
    return mean


def _with(ranked: list[dict[str, Any]], key: str, value: Any) -> list[dict[str, Any]]:
    return [one for one in ranked if one[key] == value]


def _arguments() -> argparse.Namespace:
    parser = bundle_parser(__doc__, 128)
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the bundle's chat template")
    parser.add_argument("--method", help="a drafting method; the bundle's drafter by default")
    parser.add_argument("--stops-save", action="store_true", help="the drafter's graph stops where a rule stops")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.max_new_tokens <= PAPER_LENGTHS[-1]:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: expected more than {PAPER_LENGTHS[-1]}")
    return options


if __name__ == "__main__":
    run(main)
