"""Conditional acceptance of a drafter by depth: the share of right tokens after drafts that were right so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.train.batches import Batch, gather_places
from redraft.train.training import DrafterObjective
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


_OCTAVE = 4
DRAFT_LOGIT_SCALES = tuple(2 ** (step / _OCTAVE) for step in range(4 * _OCTAVE + 1))
"""Candidate factors: 1 to 16."""
_EVERY = 4


@torch.inference_mode()
def greedy_draft_logit_scale(objective: DrafterObjective, batches: Iterable[Batch]) -> float:
    """Return the factor on a drafter's logits that makes the verifier's greedy tokens most probable, over all depths.

    A drafter learns the probability of sampling a token. With a greedy verifier, its own distribution is too flat, and
    trees built from it are too wide. The factor is that of DRAFT_LOGIT_SCALES with the highest mean log probability,
    over every fourth start of greedy texts. Tokens outside the draft vocabulary do not count.
    """
    totals = torch.zeros(len(DRAFT_LOGIT_SCALES), dtype=torch.float64)
    for batch in batches:
        with autocast_of(objective.verifier):
            totals += _log_probabilities(objective, batch.to(objective.verifier.device))
    return DRAFT_LOGIT_SCALES[int(totals.argmax())]


def _log_probabilities(objective: DrafterObjective, batch: Batch) -> torch.Tensor:
    """Sum the log probability of the verifier's tokens over starts and depths, by factor of DRAFT_LOGIT_SCALES."""
    totals = torch.zeros(len(DRAFT_LOGIT_SCALES), dtype=torch.float64)
    states = objective.states(batch)
    for step, predicted in enumerate(objective.drafts(batch, states)):
        places, real = batch.places(step + 1)
        columns = objective.vocabulary.columns_of(gather_places(states.greedy, places))[:, ::_EVERY]
        counted = (real[:, ::_EVERY] & (columns >= 0)).double()
        some = predicted[:, ::_EVERY].float()
        below = some - some.amax(-1, keepdim=True)
        found = below.gather(-1, columns.clamp(min=0)[..., None])[..., 0]
        for first in range(_OCTAVE):
            shares = (below * DRAFT_LOGIT_SCALES[first]).exp()
            for index in range(first, len(DRAFT_LOGIT_SCALES), _OCTAVE):
                log_probs = found * DRAFT_LOGIT_SCALES[index] - shares.sum(-1).log()
                totals[index] += (log_probs.double() * counted).sum().cpu()
                shares.square_()  # those of twice the factor
    return totals


RANKS = 10
"""Candidates of a depth whose accuracies are measured."""


@torch.inference_mode()
def rank_accuracies(objective: DrafterObjective, batches: Iterable[Batch]) -> list[list[float]]:
    """Return how often the candidate of a rank is the verifier's greedy token, by depth and rank, over all drafts.

    Unlike acceptance, a depth's shares count drafts that were wrong before too. Ranks are at most RANKS and the draft
    vocabulary.
    """
    ranks = min(RANKS, len(objective.vocabulary))
    right, tried = np.zeros((objective.lookahead, ranks), np.int64), np.zeros((objective.lookahead, 1), np.int64)
    for batch in batches:
        with autocast_of(objective.verifier):
            moved = batch.to(objective.verifier.device)
            states = objective.states(moved)
            for step, predicted in enumerate(objective.drafts(moved, states)):
                places, real = moved.places(step + 1)
                best = objective.vocabulary.tokens_of(predicted.topk(ranks).indices)  # most probable first
                matches = (best == gather_places(states.greedy, places)[..., None]) & real[..., None]
                right[step] += matches.sum((0, 1)).cpu().numpy()
                tried[step] += int(real.sum())
    shares: list[list[float]] = (right / np.maximum(tried, 1)).tolist()
    return shares


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


@torch.inference_mode()
def acceptance_of(objective: DrafterObjective, batches: Iterable[Batch]) -> Acceptance:
    """Measure on batches of texts, over the drafts that begin at their starts.

    A draft continues while the text equals the verifier's greedy tokens. The verifier's own greedy text always does.
    """
    top, wide = _DepthCounts(objective.lookahead), _DepthCounts(objective.lookahead)
    for batch in batches:
        with autocast_of(objective.verifier):
            _count(objective, batch.to(objective.verifier.device), top, wide)
    return Acceptance(top.shares(), wide.shares(), tuple(top.tried.tolist()))


def greedy_rows(rows: NDArray[np.integer[Any]], first: int, lookahead: int) -> list[Batch]:
    """Return batches of greedy rows [R, T + lookahead], whose drafts start at position `first` or later."""
    tokens = torch.from_numpy(rows.astype(np.int64))
    return [Batch.whole(some, ("",) * len(some), lookahead, first) for some in tokens.split(_ROWS_AT_ONCE)]


def _count(objective: DrafterObjective, batch: Batch, top: _DepthCounts, wide: _DepthCounts) -> None:
    states = objective.states(batch)
    active = wide_active = batch.starts >= 0
    for step, predicted in enumerate(objective.drafts(batch, states)):
        places, real = batch.places(step + 1)
        target_token_ids = gather_places(states.greedy, places)
        active, wide_active = active & real, wide_active & real
        best = objective.vocabulary.tokens_of(predicted.topk(WIDTH).indices)  # most probable first
        active = top.add(step, active, best[..., 0] == target_token_ids)
        wide_active = wide.add(step, wide_active, (best == target_token_ids[..., None]).any(-1))
        if step + 1 < objective.lookahead:
            following, exists = batch.places(step + 2)
            follows = exists & (gather_places(batch.tokens, following) == target_token_ids)
            active, wide_active = active & follows, wide_active & follows
