"""Sampling: from the verifier's logits to the tokens of a step.

A sampler chooses the target token after every node of a tree, and acceptance compares these with the tree's tokens.
Each request has its own sampler. Random numbers depend on the request's seed and the token's position, so that two
implementations can be compared token by token.
"""

from __future__ import annotations

from collections.abc import Collection

from redraft.runtime.params import COUPLED, SamplingParams
from redraft.runtime.sampling.constraints import Constraint
from redraft.runtime.sampling.drawn import Rejection
from redraft.runtime.sampling.greedy import Greedy
from redraft.runtime.sampling.processors import make_processors
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.sampling.walk import Walk


def make_sampler(
    params: SamplingParams, stop_tokens: Collection[int] = (), record_logit_margins: bool = False,
    constraint: Constraint | None = None,
) -> Sampler:  # fmt: skip
    """Return the sampler for a request that these tokens end, and whose text matches the compiled constraint."""
    processors = [*([constraint] if constraint else ()), *make_processors(params, stop_tokens)]
    if params.temperature and params.acceptance != COUPLED:
        return Rejection(params, processors, record_logit_margins)
    if params.temperature or processors or params.logprobs is not None:
        return Walk(params, processors, record_logit_margins)
    return Greedy(record_logit_margins)
