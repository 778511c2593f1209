"""The acceptance that theory allows a drafter's chains when texts are drawn, beside the one that comes.

    python -m experiments.sampling_bounds --engines DIR --prompts FILE … --chat --methods lyanna,draft_model

Each prompt is decoded with chains of a fixed length: greedily, with coupled sampling, and with rejection sampling. At
every drafted position whose drafts before it were accepted, p is the verifier's distribution, and q the drafter's.

- greedy, coupled, rejection: share of first children that were accepted, of each of the three runs.
- bound: mean of Σ min(p, q), the largest share that any scheme reaches which draws one candidate from q without
  knowledge of p (the maximal coupling). Rejection sampling reaches it in expectation.
- coupled in theory: mean of Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x), the probability that two Gumbel argmaxes under the
  same noise agree (Daliri et al. 2025, "Coupling without Communication and Drafter-Invariant Speculative Decoding").

Candidates that a lookup chose have no q. Each scheme accepts them with p(x), and no scheme does better: `bound` and
`coupled in theory` are this probability. Bounds are means over the positions of the run with rejection sampling.
tau is the mean of tokens a step. Its bound is 1 + the sum over depths of the products of the bounds up to a depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import Any

import numpy as np

from redraft.bench.command import bundle_parser, run
from redraft.bench.compare import Settings, first_turn
from redraft.bench.environment import environment
from redraft.bench.prompts import BenchPrompt, load_prompts
from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams, scheduler
from redraft.runtime.params import COUPLED, REJECTION
from redraft.runtime.sampling.rejection import Probs, drawn_from
from redraft.runtime.sampling.sampler import Sampler
from redraft.types import FloatArray, Outcome, Tree


@dataclass
class Counts:
    """What came and what theory allows, by depth from 1."""

    accepted: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    bound: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    coupled: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    entropy: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens a step."""
        return fmean(self.tokens)


class Watched(Sampler):
    """A sampler that records every drafted position which the verification reaches."""

    def __init__(self, inner: Sampler, temperature: float, counts: Counts) -> None:
        self._inner, self._temperature, self._counts = inner, temperature, counts

    def verify(self, logits: FloatArray, tree: Tree, tokens: Several[int]) -> Outcome:
        """Verify, and record."""
        outcome = self._inner.verify(logits, tree, tokens)
        if len(tree) == 1:
            return outcome
        counts, path = self._counts, (0, *outcome.path)
        counts.tokens.append(len(path))
        for depth, node in enumerate(path, 1):
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            counts.accepted[depth].append(depth < len(path))
            if self._temperature:
                p = softmax(logits[node] / self._temperature)
                counts.entropy.append(float(-(p * np.log(np.maximum(p, 1e-30))).sum()))
                q = None if tree.draws is None else drawn_from(tree, node, len(p))
                token = int(tree.tokens[children[0]])
                counts.bound[depth].append(float(p[token] if q is None else np.minimum(p, q).sum()))
                counts.coupled[depth].append(float(p[token]) if q is None else gumbel_agreement(p, q))
        return outcome


def softmax(logits: FloatArray) -> Probs:
    """Return probabilities in float64."""
    weights: Probs = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def gumbel_agreement(p: Probs, q: Probs) -> float:
    """Return the probability that argmax(log p + g) = argmax(log q + g) for one Gumbel g a token."""
    both = (p > 0) & (q > 0)
    order = np.argsort(p[both] / q[both])
    a, b = p[both][order], q[both][order]
    above = 1 - np.cumsum(a)  # p of tokens with a larger ratio, and of those with q = 0
    below = np.cumsum(b) + q[~both].sum()  # q of tokens with at most this ratio, and of those with p = 0
    return float((1 / (above / a + below / b)).sum())


def measure(runtime: Runtime, prompts: Several[Several[int]], how: SpeculationParams, params: SamplingParams) -> Counts:
    """Decode the prompts one by one."""
    counts = Counts()
    for number, prompt in enumerate(prompts):
        one = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=number,
            acceptance=params.acceptance,
        )
        cycle, (request,) = runtime.cycle([prompt], one, how)
        request.sampler = Watched(request.sampler, one.temperature, counts)
        for _ in scheduler.run(cycle, [request]):
            pass
    return counts


def shares(values: dict[int, Any]) -> list[float]:
    """Return means by depth."""
    return [round(fmean(values[depth]), 3) for depth in sorted(values)]


def expected_tau(by_depth: Several[float]) -> float:
    """Return 1 + Σ_d Π_{i ≤ d} a_i."""
    return 1 + sum(accumulate(by_depth, mul))


def compare(runtime: Runtime, prompts: Several[Several[int]], method: str, depth: int, params: SamplingParams) -> Any:
    """Return the figures of a method."""
    how = SpeculationParams(method, budget=Budget(nodes=depth, depth=depth, width=1))
    tokens, temperature = params.max_tokens, params.temperature
    greedy = measure(runtime, prompts, how, SamplingParams(max_tokens=tokens))
    drawn = {
        acceptance: measure(
            runtime, prompts, how,
            SamplingParams(max_tokens=tokens, temperature=temperature, acceptance=acceptance),
        )
        for acceptance in (COUPLED, REJECTION)
    }  # fmt: skip
    rejection = drawn[REJECTION]
    bound, coupled = shares(rejection.bound), shares(rejection.coupled)
    return {
        "acceptance": {"greedy": shares(greedy.accepted)}
        | {name: shares(counts.accepted) for name, counts in drawn.items()}
        | {"bound": bound, "coupled in theory": coupled},
        "tau": {"greedy": round(greedy.tau, 3)}
        | {name: round(counts.tau, 3) for name, counts in drawn.items()}
        | {"bound": round(expected_tau(bound), 3), "coupled in theory": round(expected_tau(coupled), 3)},
        "entropy": round(fmean(rejection.entropy), 3),
        "positions": len(rejection.entropy),
    }


def main() -> dict[str, Any]:
    """Measure all methods of the command line."""
    parser = bundle_parser(__doc__, max_new_tokens=96, limit=6)
    parser.add_argument("--methods", required=True, help="separated by commas")
    parser.add_argument("--depth", type=int, default=4, help="length of the chains")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--chat", action="store_true", help="wrap prompts in the chat template")
    options = parser.parse_args()
    prompts: tuple[BenchPrompt, ...] = load_prompts(options.prompts, options.limit)
    with Runtime.open(options.engines) as runtime:
        params = SamplingParams(max_tokens=options.max_new_tokens, temperature=options.temperature)
        ids = [first_turn(runtime, prompt, Settings(params, chat=options.chat)) for prompt in prompts]
        methods = {name: compare(runtime, ids, name, options.depth, params) for name in options.methods.split(",")}
    return {"environment": environment(), "prompts": len(ids), "methods": methods}


if __name__ == "__main__":
    run(main)
