"""Sampling: from the verifier's logits to the tokens of a step.

A sampler chooses the target token after every node of a tree, and acceptance compares these with the tree's tokens.
Each request has its own sampler. Random numbers depend on the request's seed and the token's position, so that two
implementations can be compared token by token.
"""

from __future__ import annotations

from redraft.errors import UsageError
from redraft.runtime.params import SamplingParams
from redraft.runtime.sampling.greedy import Greedy
from redraft.runtime.sampling.processors import Processed
from redraft.runtime.sampling.sampler import Sampler


def make_sampler(params: SamplingParams, record_logit_margins: bool = False) -> Sampler:
    """Return the sampler for `params`. Raises UsageError for a temperature above 0."""
    if params.temperature > 0:
        raise UsageError(
            f"temperature {params.temperature} asked for, only greedy decoding is available", "use temperature 0"
        )
    sampler = Greedy(record_logit_margins)
    return Processed(sampler, params.logits_processors) if params.logits_processors else sampler


def margins_of(sampler: Sampler) -> list[float] | None:
    """Return the lead of each token over the second likeliest, if the sampler recorded it."""
    inner = sampler.sampler if isinstance(sampler, Processed) else sampler
    return inner.logit_margins if isinstance(inner, Greedy) else None
