"""Conditional acceptance of a drafter by depth: the share of right tokens after drafts that were right so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.train.method import DrafterObjective
from redraft.train.verifier_model import autocast_of

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

    def __str__(self) -> str:
        return " ".join(f"{top:.3f}/{wide:.3f}" for top, wide in zip(self.top, self.wide, strict=True))


SHARPNESS = tuple(2 ** (quarter / 4) for quarter in range(17))
"""Factors that are tried: 1 to 16."""
_EVERY = 4


@torch.inference_mode()
def greedy_draft_logit_scale(objective: DrafterObjective, rows: NDArray[np.integer[Any]], first: int) -> float:
    """Return the factor on a drafter's logits that makes the verifier's likeliest tokens likeliest, over all depths.

    A drafter learns how likely a token is to be sampled. With a greedy verifier, its own distribution is too flat, and
    trees built from it are too wide. The factor is the one of SHARPNESS with the highest mean log probability, over
    every fourth position from `first` on of greedy rows [R, T + N].
    """
    totals = torch.zeros(len(SHARPNESS), dtype=torch.float64)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        tokens = torch.from_numpy(rows[begin : begin + _ROWS_AT_ONCE].astype(np.int64)).to(objective.verifier.device)
        with autocast_of(objective.verifier):
            totals += _log_probabilities(objective, tokens, first)
    return SHARPNESS[int(totals.argmax())]


def _log_probabilities(objective: DrafterObjective, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Sum the log probability of the verifier's tokens over positions and depths, by factor of SHARPNESS."""
    totals = torch.zeros(len(SHARPNESS), dtype=torch.float64)
    logits, drafts = objective.drafts(tokens)
    count = tokens.shape[1] - objective.lookahead
    for step, predicted in enumerate(drafts):
        said = logits[:, step + 1 : count + step + 1].argmax(-1)[:, first::_EVERY, None]
        some = predicted[:, first::_EVERY].float()
        for index, factor in enumerate(SHARPNESS):
            totals[index] += (some * factor).log_softmax(-1).gather(-1, said).double().sum().cpu()
    return totals


class _Tally:
    """Drafts tried and right, by depth, for one rule of being right."""

    def __init__(self, depth: int) -> None:
        self.tried, self.right = np.zeros(depth, np.int64), np.zeros(depth, np.int64)

    def add(self, step: int, alive: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
        """Count the drafts that are `alive` [B, T] at `step`; returns those of them that are right."""
        right = alive & good
        self.tried[step] += int(alive.sum())
        self.right[step] += int(right.sum())
        return right

    def shares(self) -> tuple[float, ...]:
        return tuple((self.right / np.maximum(self.tried, 1)).tolist())


def conditional_acceptance(objective: DrafterObjective, rows: NDArray[np.integer[Any]], first: int) -> Acceptance:
    """Measure on rows [R, T + N] of tokens, over drafts that start at position `first` of a row or later.

    A draft goes on while the text equals the verifier's greedy tokens (its own greedy text always does).
    """
    return acceptance_of(objective, ((rows[i : i + _ROWS_AT_ONCE], first) for i in range(0, len(rows), _ROWS_AT_ONCE)))


@torch.inference_mode()
def acceptance_of(objective: DrafterObjective, texts: Iterable[tuple[NDArray[np.integer[Any]], int]]) -> Acceptance:
    """The same for texts of any lengths: rows [B, T + N] and the first position of a draft, each."""
    top, wide = _Tally(objective.lookahead), _Tally(objective.lookahead)
    for rows, first in texts:
        tokens = torch.from_numpy(rows.astype(np.int64)).to(objective.verifier.device)
        with autocast_of(objective.verifier):
            _count(objective, tokens, first, top, wide)
    return Acceptance(top.shares(), wide.shares(), tuple(top.tried.tolist()))


def _count(objective: DrafterObjective, tokens: torch.Tensor, first: int, top: _Tally, wide: _Tally) -> None:
    logits, drafts = objective.drafts(tokens)
    said = logits.argmax(-1)  # [B, T + N]: after position p
    count = tokens.shape[1] - objective.lookahead
    alive = torch.zeros(len(tokens), count, dtype=torch.bool, device=tokens.device)
    alive[:, first:] = True
    wide_alive = alive
    for step, predicted in enumerate(drafts):
        here = slice(step + 1, count + step + 1)
        best = predicted.topk(WIDTH).indices  # likeliest first
        alive = top.add(step, alive, best[..., 0] == said[:, here])
        wide_alive = wide.add(step, wide_alive, (best == said[:, here, None]).any(-1))
        if step + 1 < objective.lookahead:
            follows = tokens[:, step + 2 : count + step + 2] == said[:, here]
            alive, wide_alive = alive & follows, wide_alive & follows
