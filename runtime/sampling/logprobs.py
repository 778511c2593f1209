"""Log probabilities of chosen tokens and of their likeliest alternatives.

They are of the distribution from which the token is drawn: after all processors, temperature and truncation. At
temperature 0 they are of the processed logits at temperature 1. So a token that is never drawn has none, and exp of the
chosen token's log probability is how often it is drawn. (vLLM's default is before processors; its mode
`processed_logprobs` is this one.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.runtime.sampling.truncation import Support, log_probs


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of the answer, its log probability, and the likeliest tokens there with theirs, the likeliest first.

    top: at most as many as requested; fewer if truncation left fewer.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        top = [{"token_id": token, "logprob": value} for token, value in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top": top}


def token_logprobs(support: Support, place: int, alternatives: int) -> TokenLogprobs:
    """Return the log probabilities of the token at `place`, and of the `alternatives` likeliest of `support`.

    Of equally likely tokens, those with lower ids come first.
    """
    values = log_probs(support.scores)
    count = min(alternatives, len(values))
    likely = np.flatnonzero(values >= np.partition(values, -count)[-count]) if count else np.empty(0, np.int64)
    order = likely[np.argsort(-values[likely], kind="stable")][:count]
    top = [(support.token(found), float(values[found])) for found in order.tolist() if values[found] > -np.inf]
    return TokenLogprobs(support.token(place), float(values[place]), tuple(top))
