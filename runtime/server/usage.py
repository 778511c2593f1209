"""What an answer took: OpenAI's `usage`, and the figures of its speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redraft.runtime.drafters.chain_lookups import PredictedText
from redraft.runtime.requests.request import Request


def usage(requests: Sequence[Request], choices: int) -> dict[str, Any]:
    """Return the tokens of requests that have ended. Each `choices` in a row continue one prompt, which counts once.

    cached_tokens: those of a prompt's first request.   accepted and rejected prediction tokens: drafted from the
    request's `prediction`, and taken, or replaced by another token.
    """
    firsts = requests[::choices]
    prompt = sum(request.prompt_length for request in firsts)
    completion = sum(len(request.new_tokens) for request in requests)
    predicted = [state for one in requests for state in one.drafting.values() if isinstance(state, PredictedText)]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(state.accepted for state in predicted),
            "rejected_prediction_tokens": sum(state.rejected for state in predicted),
        },
    }


def speculation(requests: Sequence[Request], seed: int) -> dict[str, Any]:
    """Return the verification steps of requests that have ended, their drafted and accepted tokens, and the seed.

    seed: that of the choice of index 0; the choice of index i has this seed plus i.
    """
    counters = [request.counters for request in requests]
    steps = sum(one.steps for one in counters)
    tokens = sum(len(request.new_tokens) for request in requests)
    return {
        "steps": steps,
        "drafted": sum(one.drafted for one in counters),
        "accepted": sum(one.accepted for one in counters),
        "tokens_per_step": tokens / steps if steps else 0.0,
        "seed": seed,
    }
