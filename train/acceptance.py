"""Conditional acceptance of a drafter by depth: the share of right tokens after drafts that were right so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.train.batches import Batch, gather_places
from redraft.train.distillation import Distillation
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
RANKS = 10
"""Candidates of a depth whose accuracies are measured."""


class _Depth(NamedTuple):
    """Drafts of a batch at one depth: logits [B, S, H], the verifier's greedy tokens [B, S], and which drafts count."""

    batch: Batch
    step: int
    logits: torch.Tensor
    greedy: torch.Tensor
    real: torch.Tensor


def _depths(objective: Distillation, batches: Iterable[Batch]) -> Iterator[_Depth]:
    """Yield every depth of the drafts of every batch. Products have the verifier's type, as in training."""
    for some in batches:
        with autocast_of(objective.verifier):
            batch = some.to(objective.verifier.device)
            states = objective.states(batch)
            for step, logits in enumerate(objective.drafts(batch, states)):
                places, real = batch.places(step + 1)
                yield _Depth(batch, step, logits, gather_places(states.greedy, places), real)


@torch.inference_mode()
def greedy_draft_logit_scale(objective: Distillation, batches: Iterable[Batch]) -> float:
    """Return the factor on a drafter's logits that makes the verifier's greedy tokens most probable, over all depths.

    A drafter learns the probability of sampling a token. With a greedy verifier, its own distribution is too flat, and
    trees built from it are too wide. The factor is that of DRAFT_LOGIT_SCALES with the highest mean log probability,
    over every fourth start of greedy texts. Tokens outside the draft vocabulary do not count.
    """
    totals = torch.zeros(len(DRAFT_LOGIT_SCALES), dtype=torch.float64)
    for depth in _depths(objective, batches):
        columns = objective.vocabulary.columns_of(depth.greedy)[:, ::_EVERY]
        counted = (depth.real[:, ::_EVERY] & (columns >= 0)).double()
        some = depth.logits[:, ::_EVERY].float()
        below = some - some.amax(-1, keepdim=True)
        found = below.gather(-1, columns.clamp(min=0)[..., None])[..., 0]
        for first in range(_OCTAVE):
            shares = (below * DRAFT_LOGIT_SCALES[first]).exp()
            for index in range(first, len(DRAFT_LOGIT_SCALES), _OCTAVE):
                log_probs = found * DRAFT_LOGIT_SCALES[index] - shares.sum(-1).log()
                totals[index] += (log_probs.double() * counted).sum().cpu()
                shares.square_()  # those of twice the factor
    return DRAFT_LOGIT_SCALES[int(totals.argmax())]


@torch.inference_mode()
def rank_accuracies(objective: Distillation, batches: Iterable[Batch]) -> list[list[float]]:
    """Return how often the candidate of a rank is the verifier's greedy token, by depth and rank, over all drafts.

    Unlike acceptance, a depth's shares count drafts that were wrong before too. Ranks are at most RANKS and the draft
    vocabulary.
    """
    ranks = min(RANKS, len(objective.vocabulary))
    right, tried = np.zeros((objective.lookahead, ranks), np.int64), np.zeros((objective.lookahead, 1), np.int64)
    for depth in _depths(objective, batches):
        best = objective.vocabulary.tokens_of(depth.logits.topk(ranks).indices)  # most probable first
        matches = (best == depth.greedy[..., None]) & depth.real[..., None]
        right[depth.step] += matches.sum((0, 1)).cpu().numpy()
        tried[depth.step] += int(depth.real.sum())
    shares: list[list[float]] = (right / np.maximum(tried, 1)).tolist()
    return shares


class _DepthCounts:
    """Numbers of drafts tried and right, by depth, for one rule of being right."""

    def __init__(self, depth: int) -> None:
        self.tried, self.right = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
        self._active = torch.empty(0)

    def add(self, depth: _Depth, matches: torch.Tensor, follows: torch.Tensor) -> None:
        """Count the drafts that were right at every depth before. `follows`: those whose text goes on alike."""
        active = (self._active if depth.step else depth.batch.starts >= 0) & depth.real
        right = active & matches
        self.tried[depth.step] += int(active.sum())
        self.right[depth.step] += int(right.sum())
        self._active = right & follows

    def shares(self) -> tuple[float, ...]:
        return tuple((self.right / np.maximum(self.tried, 1)).tolist())


@torch.inference_mode()
def acceptance_of(objective: Distillation, batches: Iterable[Batch]) -> Acceptance:
    """Measure on batches of texts, over the drafts that begin at their starts.

    A draft continues while the text equals the verifier's greedy tokens. The verifier's own greedy text always does.
    """
    top, wide = _DepthCounts(objective.lookahead), _DepthCounts(objective.lookahead)
    for depth in _depths(objective, batches):
        best = objective.vocabulary.tokens_of(depth.logits.topk(WIDTH).indices)  # most probable first
        following, exists = depth.batch.places(depth.step + 2)
        follows = exists & (gather_places(depth.batch.tokens, following) == depth.greedy)
        top.add(depth, best[..., 0] == depth.greedy, follows)
        wide.add(depth, (best == depth.greedy[..., None]).any(-1), follows)
    return Acceptance(top.shares(), wide.shares(), tuple(top.tried.tolist()))


def greedy_rows(rows: NDArray[np.integer[Any]], first: int, lookahead: int) -> list[Batch]:
    """Return batches of greedy rows [R, T + lookahead], whose drafts start at position `first` or later."""
    tokens = torch.from_numpy(rows.astype(np.int64))
    return [Batch.whole(some, ("",) * len(some), lookahead, first) for some in tokens.split(_ROWS_AT_ONCE)]
