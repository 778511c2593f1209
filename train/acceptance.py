"""Conditional acceptance of a drafter by depth: given that what it drafted so far was right, is the next token?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.train.objectives.lyanna import LyannaObjective, chains, step_logits, verifier_states

_ROWS_AT_ONCE = 8
WIDTH = 4
"""Candidates a level, as in the paper's experiments."""


@dataclass(frozen=True)
class Acceptance:
    """Shares by depth, from depth 1 on; `starts[d]` drafts were right up to there in their likeliest tokens.

    top:  the likeliest token is the verifier's, given that it was at every depth before.
    wide: the verifier's token is among the WIDTH likeliest, given that it was at every depth before.
    """

    top: tuple[float, ...]
    wide: tuple[float, ...]
    starts: tuple[int, ...]


@torch.inference_mode()
def conditional_acceptance(objective: LyannaObjective, rows: NDArray[np.integer], first: int) -> Acceptance:
    """Measure on rows [R, T + N] of tokens, over drafts that start at position `first` of a row or later.

    A draft goes on while the text is what the verifier would say (all of its own greedy text is).
    """
    steps = objective.drafter.config.steps
    hits, wide_hits = np.zeros(steps), np.zeros(steps)
    tried, wide_tried = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    verifier = objective.verifier
    head, embed = verifier.get_output_embeddings().weight, verifier.get_input_embeddings()
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        tokens = torch.from_numpy(rows[begin : begin + _ROWS_AT_ONCE].astype(np.int64)).to(verifier.device)
        features, logits = verifier_states(verifier, tokens)
        said = logits.argmax(-1)  # [B, T + N]: after position p
        count = tokens.shape[1] - steps
        alive = torch.zeros(len(tokens), count, dtype=torch.bool, device=verifier.device)
        alive[:, first:] = True
        wide_alive = alive.clone()
        for step, hidden in enumerate(chains(objective.drafter, features[:, :count], tokens, embed)):
            here = slice(step + 1, count + step + 1)
            predicted = step_logits(objective.drafter, hidden, tokens[:, here], head, embed)
            best = predicted.topk(WIDTH).indices
            hit, wide = best[..., 0] == said[:, here], (best == said[:, here, None]).any(-1)
            for alive_now, good, total, seen in ((alive, hit, hits, tried), (wide_alive, wide, wide_hits, wide_tried)):
                seen[step] += int(alive_now.sum())
                total[step] += int((alive_now & good).sum())
            if step + 1 < steps:
                follows = tokens[:, step + 2 : count + step + 2] == said[:, here]
                alive, wide_alive = alive & hit & follows, wide_alive & wide & follows
    return Acceptance(
        tuple((hits / np.maximum(tried, 1)).tolist()),
        tuple((wide_hits / np.maximum(wide_tried, 1)).tolist()),
        tuple(tried.tolist()),
    )
