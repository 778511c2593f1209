"""Batches whose content is a pure function of (seed, step): the form of all batches, and those from token streams.

Each kind is one stream of tokens, cut into blocks. An epoch permutes them and has its own phase. No token is thus seen
twice before all are seen once, and the next epoch cuts at other places. A folder may keep the verifier's states of
batches, so that runs with the same batches compute them once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import DataError, TrainingError
from redraft.files import write_json
from redraft.train.config import Recipe
from redraft.train.states import States
from redraft.train.text_shards import FORM, HIDDEN, TOP, Shards

_CYCLE_ROWS = 100  # shares are exact over this number of rows


@dataclass(frozen=True)
class Batch:
    """Rows of texts.

    tokens: i64[B, L].   kinds: of every row.
    starts: i64[B, S], positions that drafts start at, with the feature there and the token after it; -1 is padding.
    ends:   i64[B], the number of positions of a row whose next token may be predicted.
    states: what the verifier computed of the tokens, if that was kept.
    """

    tokens: torch.Tensor
    kinds: tuple[str, ...]
    starts: torch.Tensor
    ends: torch.Tensor
    states: States | None = None

    @classmethod
    def whole(cls, tokens: torch.Tensor, kinds: tuple[str, ...], lookahead: int, first: int = 0) -> Batch:
        """Return rows of equal length, with drafts from position `first` to `lookahead` positions before the end."""
        rows, length = tokens.shape
        starts = torch.arange(first, length - lookahead).expand(rows, -1)
        return cls(tokens, kinds, starts, torch.full((rows,), length))

    @property
    def size(self) -> int:
        """Tokens of the rows, without padding."""
        return int(self.ends.sum())

    def places(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions [B, S] whose features and next tokens drafts predict at this depth, from 1 on.

        The second tensor [B, S] is False for drafts that are padding or end before this depth; their position is 0.
        """
        places = self.starts + depth
        real = (self.starts >= 0) & (places < self.ends[:, None])
        return places.where(real, 0), real

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        tokens, starts, ends = (tensor.to(device) for tensor in (self.tokens, self.starts, self.ends))
        return Batch(tokens, self.kinds, starts, ends, self.states and self.states.to(device))


def gather_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows [B, S, ...] of `rows` [B, L, ...] at places [B, S]."""
    index = places.reshape(*places.shape, *(1,) * (rows.dim() - 2)).expand(*places.shape, *rows.shape[2:])
    return rows.gather(1, index)


def similar_lengths(
    order: NDArray[np.int64], lengths: NDArray[np.int64], rows: int, together: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return batches of `rows` texts of similar lengths in random order, from a random order of texts.

    The texts of `together` batches are sorted by length together. The last batch may have fewer texts.
    """
    batches: list[NDArray[np.int64]] = []
    for some in np.split(order, range(together * rows, len(order), together * rows)):
        by_length = some[np.argsort(lengths[some], kind="stable")]
        parts = np.split(by_length, range(rows, len(some), rows))
        batches += [parts[i] for i in rng.permutation(len(parts))]
    return batches


class BatchSource(Protocol):
    """A run's batches."""

    def batch(self, step: int, recipe: Recipe) -> Batch:
        """Return the batch of `step`."""


class BatchPlan:
    """Draws rows from token streams in fixed shares; `rows(step)` never depends on earlier draws."""

    def __init__(
        self, streams: Mapping[str, NDArray[np.integer[Any]]], weights: Mapping[str, float], seed: int, lookahead: int
    ) -> None:
        """`streams` maps kinds to 1-D token arrays. A row of T inputs has `lookahead` more tokens, for its targets.

        Raises DataError if kinds and weights differ.
        """
        if set(streams) != set(weights):
            raise DataError(f"data kinds {sorted(streams)} do not match the recipe's weights {sorted(weights)}")
        self._streams = dict(streams)
        self._cycle = _interleave(weights)
        self._seed = seed
        self._lookahead = lookahead

    def batch(self, step: int, recipe: Recipe) -> Batch:
        """Return the batch of `step`: `batch_tokens` inputs in rows of the recipe's length, kinds interleaved."""
        length = recipe.row_length(step)
        rows = recipe.batch_tokens // length
        drawn = [self._draw(step * rows + row) for row in range(rows)]
        tokens = np.stack([self._row(kind, index, length) for kind, index in drawn])
        kinds = tuple(kind for kind, _ in drawn)
        return Batch.whole(torch.from_numpy(tokens.astype(np.int64)), kinds, self._lookahead)

    def _draw(self, row: int) -> tuple[str, int]:
        """Return the kind of the run's `row`-th row, and the number of earlier rows of this kind."""
        cycle, place = divmod(row, len(self._cycle))
        kind = self._cycle[place]
        return kind, cycle * self._cycle.count(kind) + self._cycle[:place].count(kind)

    def _row(self, kind: str, index: int, length: int) -> NDArray[np.integer[Any]]:
        stream = self._streams[kind]
        blocks = blocks_of(kind, len(stream), length, self._lookahead)
        epoch, place = divmod(index, blocks)
        salt = sum(map(ord, kind))
        rng = np.random.Generator(np.random.PCG64([self._seed, salt, epoch, length]))
        start = int(rng.integers(length)) + int(rng.permutation(blocks)[place]) * length
        return stream[start : start + length + self._lookahead]


def blocks_of(kind: str, tokens: int, length: int, lookahead: int) -> int:
    """Return the number of rows of `length` in an epoch over `tokens` tokens. Raises DataError if it is zero."""
    blocks = (tokens - lookahead) // length - 1
    if blocks < 1:
        raise DataError(
            f"the corpus of {kind} has {tokens} tokens, too few for rows of {length}", "give a longer corpus"
        )
    return blocks


def _interleave(weights: Mapping[str, float]) -> tuple[str, ...]:
    """Return a cycle of kinds in the given proportions, each kind spread evenly over it."""
    total = sum(weights.values())
    counts = {kind: max(1, round(_CYCLE_ROWS * weight / total)) for kind, weight in weights.items()}
    slots = [((n + 0.5) / count, kind) for kind, count in counts.items() for n in range(count)]
    return tuple(kind for _, kind in sorted(slots))


class KeptStates:
    """A plan whose batches have states.

    facts.json    the verifier's digests, the type of its products, the digest of the documents, the hidden states
    shards/NNNN/  a step's tokens [B, L] and states, as of `redraft.train.text_shards`, but with rows
    """

    def __init__(
        self, plan: BatchSource, folder: Path, facts: Mapping[str, Any], hidden_states: Sequence[str],
        compute: Callable[[Batch], States],
    ) -> None:  # fmt: skip
        """facts: of the verifier and its texts, plain values.   compute: returns the states of a batch.

        Raises TrainingError if the folder keeps states of other facts.
        """
        self._plan, self._folder, self._compute = plan, folder, compute
        self._names = (*(HIDDEN + name for name in hidden_states), *TOP)
        self._shards = Shards(folder)
        path = folder / "facts.json"
        now = json.loads(json.dumps({**facts, **FORM, "hidden_states": list(hidden_states)}))
        if not path.exists():
            write_json(path, now)
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed := next((name for name in now if before.get(name) != now[name]), None):
            raise TrainingError(
                f"{folder} keeps states of a run that differs in its {changed}", "remove it, or give another --out"
            )

    def batch(self, step: int, recipe: Recipe) -> Batch:
        """Return the batch of `step`. Raises DataError if the folder keeps another batch of this step."""
        batch = self._plan.batch(step, recipe)
        if step not in self._shards:
            computed = self._compute(batch)
            arrays = {"tokens": batch.tokens.numpy(), **computed.to_numpy()}
            if not self._shards.fits(sum(array.nbytes for array in arrays.values())):
                return replace(batch, states=computed)
            self._shards.add(step, arrays)
        shard = self._shards[step]  # also now, in 8 bits, as the next run has them
        if not np.array_equal(shard.array("tokens"), batch.tokens.numpy()):
            raise DataError(f"{self._folder} keeps other texts for step {step}", "remove it; the run computes it again")
        tensors = {name: torch.from_numpy(np.array(shard.array(name))) for name in self._names}
        return replace(batch, states=States.of_tensors(tensors))
