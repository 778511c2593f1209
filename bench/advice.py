"""When speculation pays, predicted from measured costs and acceptance.

Leviathan et al. 2023 (arXiv 2211.17192), Theorem 3.8, with measured costs in place of one verification's and one
drafted token's: a step of B sequences that verifies trees of n nodes commits τ = 1 + (the sum over the nodes of their
probability to be accepted) tokens a sequence. It takes t(B, B (1 + n)) + a(B, n), a plain step t(B, B) + a(B, 0). t is
the time of a verification, a that of the rest: drafting and the host. The gain is τ times a plain step's time over a
speculative step's. Its break-even is the τ for which it is 1.

The theorem takes all drafted tokens as equally likely. Here each node of a tree has a share by its rank, from traced
steps with the largest trees. A smaller tree has the likeliest nodes of a larger one. A method that resamples has a
share for each number of steps of its last draft that are used, and the mix of these steps follows from the shares.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from redraft.bench.compare import PLAIN
from redraft.bench.plots import COLOURS, GREY, Pictures
from redraft.bench.statistics import interval_text
from redraft.methods.base import resampled_nodes
from redraft.runtime.controllers.cost import CostCurve
from redraft.types import OfferKind

HEADER = ("method", "batch", "nodes", "tokens a step", "break-even", "accepted", "break-even", "gain", "fastest")
CHECK_HEADER = ("method", "batch", "nodes", "predicted gain", "measured gain", "95 % interval", "difference")
_LINES = {"tokens": ("-", ""), "least_tokens": ("--", ", break-even")}
"""Line of each kind of tokens in the picture, and its name after the method's."""


class DraftStep(NamedTuple):
    """A step that verified a draft.

    used: tokens that came since the draft was made: 0 for a fresh draft, more for a resampled one.
    nodes: of its tree, without the root.   accepted: ranks of the accepted nodes by depth. The likeliest has rank 1.
    """

    used: int
    nodes: int
    accepted: tuple[int, ...]


def draft_steps(lines: Iterable[str], max_tokens: int, depth: int) -> Iterator[DraftStep]:
    """Yield the steps of a trace that verified drafts.

    max_tokens: of each request, whose last steps cut trees of `depth` levels. They are left out.
    """
    used = committed = 0
    for values in map(json.loads, lines):
        if "prompt" in values:
            committed = 0
        if "position" not in values:
            continue
        used = used if values["source"] == OfferKind.RESAMPLE else 0
        chances = values["log_probs"]
        likeliest = sorted(range(1, len(chances)), key=lambda node: -chances[node])
        rank = {node: place for place, node in enumerate(likeliest, 1)}
        if values["source"] != OfferKind.NONE and max_tokens - committed > depth:
            yield DraftStep(used, len(likeliest), tuple(rank[node] for node in values["path"]))
        used += len(values["committed"])
        committed += len(values["committed"])


class Expected(NamedTuple):
    """Means of a step: tokens of a sequence, the verifier's own included, and drafted nodes."""

    tokens: float
    drafted: float


class AcceptanceCurve:
    """Expected tokens of a step by the size of trees, from steps with the largest ones."""

    def __init__(self, steps: Iterable[DraftStep]) -> None:
        """Raises ValueError without a fresh draft among the steps."""
        by_used: defaultdict[int, list[DraftStep]] = defaultdict(list)
        for step in steps:
            by_used[step.used].append(step)
        if 0 not in by_used:
            raise ValueError("no step had a fresh draft")
        self._by_used = dict(sorted(by_used.items()))

    @property
    def shares(self) -> list[float]:
        """Shares of fresh drafts whose node of rank 1, 2 … was accepted."""
        fresh = self._by_used[0]
        counts = Counter(rank for step in fresh for rank in step.accepted)
        return [counts[rank] / len(fresh) for rank in range(1, 1 + max(step.nodes for step in fresh))]

    def expected(self, nodes: int) -> Expected:
        """Return the means over steps with trees of at most `nodes` nodes, as a fixed budget makes them.

        After a step, a method resamples if it did so in the traced steps after as many used tokens.
        """
        visits = dict.fromkeys(self._by_used, 0.0)
        visits[0] = 1.0
        tokens = drafted = count = 0.0
        for used, steps in self._by_used.items():  # tokens only add to the used ones, so this order sees all visits
            most, share = resampled_nodes(nodes) if used else nodes, visits[used] / len(steps)
            for step in steps:
                came = 1 + sum(rank <= most for rank in step.accepted)
                tokens += share * came
                drafted += share * min(step.nodes, most)
                if used + came in visits:
                    visits[used + came] += share
            count += visits[used]
        return Expected(tokens / count, drafted / count)


def at(values: Mapping[int, float], nodes: int) -> float:
    """Return a value on straight lines between those of a few trees by drafted nodes. Plain steps, of 0, are apart."""
    places = [place for place in sorted(values) if bool(place) == bool(nodes)]
    return float(np.interp(nodes, places, [values[place] for place in places]))


@dataclass(frozen=True)
class StepTimes:
    """Times of a method's steps in a batch, by most drafted nodes of a tree.

    curve: t of verifications alone.   factors: times of verifications in decoding over those.
    aside_ms: of the rest of a step: drafting and the host.
    """

    curve: CostCurve
    factors: Mapping[int, float]
    aside_ms: Mapping[int, float]

    def step_ms(self, nodes: int, drafted: float) -> float:
        """Return the time of a step with trees of a mean of `drafted` nodes, of at most `nodes`."""
        return curve_ms(self.curve, drafted) * at(self.factors, nodes) + at(self.aside_ms, nodes)


class StepMs(NamedTuple):
    """Means of a batch's steps in decoding: milliseconds of the verification and of the rest, drafted nodes a tree."""

    verify_ms: float
    aside_ms: float
    drafted: float


def step_times(curve: CostCurve, steps: Mapping[int, StepMs]) -> StepTimes:
    """Return the times from those of steps, by most drafted nodes of a tree."""
    factors = {nodes: each.verify_ms / curve_ms(curve, each.drafted) for nodes, each in steps.items()}
    return StepTimes(curve, factors, {nodes: each.aside_ms for nodes, each in steps.items()})


def curve_ms(curve: CostCurve, drafted: float) -> float:
    """Return t for a mean number of drafted nodes of a tree."""
    return float(np.interp(1 + drafted, range(1, curve.largest + 1), curve.table_ms[1:]))


@dataclass(frozen=True)
class Advice:
    """The prediction for trees of one size in a batch.

    nodes: most drafted ones of a tree.   tokens: of a sequence in a step, the verifier's own included.
    drafted: mean nodes of a step's tree.   least_tokens: a step's time over a plain one's. More tokens of a step pay.
    """

    batch: int
    nodes: int
    tokens: float
    drafted: float
    least_tokens: float

    @property
    def accepted(self) -> float:
        """The share of drafted nodes that is accepted."""
        return (self.tokens - 1) / self.drafted

    @property
    def least_accepted(self) -> float:
        """The share of drafted nodes from which speculation pays."""
        return (self.least_tokens - 1) / self.drafted

    @property
    def gain(self) -> float:
        """Tokens a second over plain decoding."""
        return self.tokens / self.least_tokens

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        more = {"accepted": self.accepted, "least_accepted": self.least_accepted, "gain": self.gain}
        return {**vars(self), **more, "pays": self.gain > 1}


def advise(curve: AcceptanceCurve, times: StepTimes, batch: int, nodes: int) -> Advice:
    """Return the prediction for trees of at most `nodes` nodes, at least 1."""
    found = curve.expected(nodes)
    return Advice(batch, nodes, *found, times.step_ms(nodes, found.drafted) / times.step_ms(0, 0.0))


def best(curve: AcceptanceCurve, times: StepTimes, batch: int, most: int) -> Advice:
    """Return the prediction of the fastest size from 1 to `most`. It may be slower than plain decoding."""
    return max((advise(curve, times, batch, nodes) for nodes in range(1, most + 1)), key=lambda each: each.gain)


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a header, and a row for each method and batch, from what `redraft advise --json` prints."""
    rows = [list(HEADER)]
    for method, found in methods.items():
        for batch, each in found["batches"].items():
            tokens = [f"{each[name]:.2f}" for name in ("tokens", "least_tokens")]
            shares = [f"{100 * max(each[name], 0):.0f} %" for name in ("accepted", "least_accepted")]
            fastest = method if each["pays"] else PLAIN
            rows.append([method, batch, str(each["nodes"]), *tokens, *shares, f"{each['gain']:.2f}", fastest])
    return rows


def check_table(checked: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return a header, and a row for each method and batch, from `check` of what `redraft advise --json` prints."""
    rows = [list(CHECK_HEADER)]
    for method, by_batch in checked.items():
        for batch, each in by_batch.items():
            gains = [f"{each[name]:.2f}" for name in ("predicted", "measured")]
            interval, difference = interval_text(each["measured_interval"]), f"{100 * each['difference']:+.1f} %"
            rows.append([method, batch, str(each["nodes"]), *gains, interval, difference])
    return rows


def draw(methods: Mapping[str, Mapping[str, Any]], pictures: Pictures, name: str) -> None:
    """Draw gains by batch, and below them tokens a step next to those of the break-even."""
    with pictures.axes(name, height=7, rows=2, ylabel="times as fast as plain decoding") as (gains, tokens):
        for number, (method, found) in enumerate(methods.items()):
            batches, advised = [*map(int, found["batches"])], [*found["batches"].values()]
            colour = COLOURS[number % len(COLOURS)]
            gains.plot(batches, [each["gain"] for each in advised], color=colour, label=method)
            for key, (line, name_after) in _LINES.items():
                values = [each[key] for each in advised]
                tokens.plot(batches, values, line, color=colour, label=f"{method}{name_after}")
            for axes in (gains, tokens):
                axes.set_xscale("log", base=2)
                axes.set_xticks(batches, map(str, batches))
        gains.axhline(1, color=GREY, linestyle="--", marker="", label="plain decoding")
        tokens.set(xlabel="sequences at once", ylabel="tokens a step of a sequence")
        tokens.legend(fontsize=8, ncols=2)
