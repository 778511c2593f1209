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
    """Shares of drafts by depth, from depth 1 on, among the drafts that were right at every depth before.

    top:    shares whose most probable token is the verifier's.
    wide:   shares with the verifier's token among the WIDTH most probable ones.
    starts: numbers of drafts whose most probable tokens were right at every depth before.
    """

    top: tuple[float, ...]
    wide: tuple[float, ...]
    starts: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(f"{top:.3f}/{wide:.3f}" for top, wide in zip(self.top, self.wide, strict=True))


DRAFT_LOGIT_SCALES = tuple(2 ** (quarter / 4) for quarter in range(17))
"""Candidate factors: 1 to 16."""
_EVERY = 4


@torch.inference_mode()
def greedy_draft_logit_scale(objective: DrafterObjective, rows: NDArray[np.integer[Any]], first: int) -> float:
    """Return the factor on a drafter's logits that makes the verifier's greedy tokens most probable, over all depths.

    A drafter learns the probability of sampling a token. With a greedy verifier, its own distribution is too flat, and
    trees built from it are too wide. The factor is that of DRAFT_LOGIT_SCALES with the highest mean log probability,
    over every fourth position from `first` on of greedy rows [R, T + N].
    """
    totals = torch.zeros(len(DRAFT_LOGIT_SCALES), dtype=torch.float64)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        tokens = torch.from_numpy(rows[begin : begin + _ROWS_AT_ONCE].astype(np.int64)).to(objective.verifier.device)
        with autocast_of(objective.verifier):
            totals += _log_probabilities(objective, tokens, first)
    return DRAFT_LOGIT_SCALES[int(totals.argmax())]


def _log_probabilities(objective: DrafterObjective, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Sum the log probability of the verifier's tokens over positions and depths, by factor of DRAFT_LOGIT_SCALES."""
    totals = torch.zeros(len(DRAFT_LOGIT_SCALES), dtype=torch.float64)
    logits, drafts = objective.drafts(tokens)
    count = tokens.shape[1] - objective.lookahead
    for step, predicted in enumerate(drafts):
        target_token_ids = logits[:, step + 1 : count + step + 1].argmax(-1)[:, first::_EVERY, None]
        some = predicted[:, first::_EVERY].float()
        for index, factor in enumerate(DRAFT_LOGIT_SCALES):
            totals[index] += (some * factor).log_softmax(-1).gather(-1, target_token_ids).double().sum().cpu()
    return totals


class _DepthCounts:
    """Numbers of drafts tried and right, by depth, for one rule of being right."""

    def __init__(self, depth: int) -> None:
        self.tried, self.right = np.zeros(depth, np.int64), np.zeros(depth, np.int64)

    def add(self, step: int, active: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
        """Count the drafts that are `active` [B, T] at `step`. Returns the active drafts that are right."""
        right = active & matches
        self.tried[step] += int(active.sum())
        self.right[step] += int(right.sum())
        return right

    def shares(self) -> tuple[float, ...]:
        return tuple((self.right / np.maximum(self.tried, 1)).tolist())


def conditional_acceptance(objective: DrafterObjective, rows: NDArray[np.integer[Any]], first: int) -> Acceptance:
    """Measure on rows [R, T + N] of tokens, over drafts that start at position `first` of a row or later.

    A draft continues while the text equals the verifier's greedy tokens. The verifier's own greedy text always does.
    """
    return acceptance_of(objective, ((rows[i : i + _ROWS_AT_ONCE], first) for i in range(0, len(rows), _ROWS_AT_ONCE)))


@torch.inference_mode()
def acceptance_of(objective: DrafterObjective, texts: Iterable[tuple[NDArray[np.integer[Any]], int]]) -> Acceptance:
    """Measure on texts of any lengths: each has rows [B, T + N] and the first position of a draft."""
    top, wide = _DepthCounts(objective.lookahead), _DepthCounts(objective.lookahead)
    for rows, first in texts:
        tokens = torch.from_numpy(rows.astype(np.int64)).to(objective.verifier.device)
        with autocast_of(objective.verifier):
            _count(objective, tokens, first, top, wide)
    return Acceptance(top.shares(), wide.shares(), tuple(top.tried.tolist()))


def _count(
    objective: DrafterObjective, tokens: torch.Tensor, first: int, top: _DepthCounts, wide: _DepthCounts
) -> None:
    logits, drafts = objective.drafts(tokens)
    target_token_ids = logits.argmax(-1)  # [B, T + N]: after position p
    count = tokens.shape[1] - objective.lookahead
    active = torch.zeros(len(tokens), count, dtype=torch.bool, device=tokens.device)
    active[:, first:] = True
    wide_active = active
    for step, predicted in enumerate(drafts):
        here = slice(step + 1, count + step + 1)
        best = predicted.topk(WIDTH).indices  # most probable first
        active = top.add(step, active, best[..., 0] == target_token_ids[:, here])
        wide_active = wide.add(step, wide_active, (best == target_token_ids[:, here, None]).any(-1))
        if step + 1 < objective.lookahead:
            follows = tokens[:, step + 2 : count + step + 2] == target_token_ids[:, here]
            active, wide_active = active & follows, wide_active & follows
