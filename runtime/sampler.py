"""Sampling: from the verifier's logits to the tokens of a step.

A sampler chooses the target token after every node of a tree, and acceptance compares these with the tree's tokens.
Each request has its own sampler. Random numbers depend on the request's seed and the token's position, so that two
implementations can be compared token by token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.params import LogitsProcessor, SamplingParams
from redraft.runtime.tree import accepted_path
from redraft.types import FloatArray, Outcome, Tree


class Sampler(ABC):
    """Chooses the verifier's tokens for one request."""

    @abstractmethod
    def sample(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Sequence[int]:
        """Return the target token after every node of `tree`.

        logits: float32[n, V], a row a node; read only, overwritten by the next step.
        tokens: all committed ones; the last is the root, and its next token has position len(tokens).
        """

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Sample, and accept the nodes of `tree` that agree. The arguments are those of `sample`."""
        return accept(tree, self.sample(logits, tree, tokens))


@runtime_checkable
class OverTokens(Protocol):
    """A sampler that needs only the verifier's likeliest token after each node, not the logits."""

    def sample_likeliest(self, likeliest: Sequence[int], tree: Tree, tokens: Sequence[int]) -> Sequence[int]:
        """Return the target token after every node. The arguments are those of `Sampler.sample`."""


def accept(tree: Tree, target_token_ids: Sequence[int]) -> Outcome:
    """Accept the nodes whose tokens are their parents' target tokens. The bonus is the last one's target token."""
    path: tuple[int, ...] = ()
    if len(target_token_ids) > 1:
        path = accepted_path(tree.tokens.tolist(), tree.parents.tolist(), target_token_ids)
    tokens = (target_token_ids[0], *[target_token_ids[node] for node in path])
    return Outcome(target_token_ids, path, tokens[-1], tokens)


class Greedy(Sampler):
    """Chooses the likeliest token. If requested, `logit_margins` records its lead over the second largest logit.

    If the lead is tiny, kernels that round differently may choose another token.
    """

    def __init__(self, record_logit_margins: bool = False) -> None:
        self.logit_margins: list[float] | None = [] if record_logit_margins else None

    def sample(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> list[int]:
        """Return the likeliest token after every node."""
        likeliest: list[int] = logits.argmax(axis=-1).tolist()
        return likeliest

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Accept the nodes that agree, and record logit margins if requested."""
        outcome = accept(tree, self.sample(logits, tree, tokens))
        if self.logit_margins is not None:
            self.logit_margins.extend(top_two_margins(logits[[0, *outcome.path]]))
        return outcome


class Processed(Sampler):
    """A sampler over logits that processors have changed."""

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor]) -> None:
        self.sampler = sampler
        self._processors = processors

    def sample(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Sequence[int]:
        """Sample from the processed logits."""
        return self.sampler.sample(self._processed(logits, tree, tokens), tree, tokens)

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Verify with the processed logits."""
        return self.sampler.verify(self._processed(logits, tree, tokens), tree, tokens)

    def _processed(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> FloatArray:
        """Return new logits [n, V]. The processors of each row receive the tokens of its node's path."""
        found = logits.copy()
        ids = tree.tokens.tolist()
        paths = [tuple(tokens)]
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            paths.append((*paths[parent], ids[node]))
        for row, path in enumerate(paths):
            for process in self._processors:
                found[row] = _checked(process(path, found[row]), found[row].shape)
        return found


def _checked(logits: object, shape: tuple[int, ...]) -> FloatArray:
    """Check a logits processor's result. Raises UsageError unless it is an array of this shape without NaN."""
    if logits is None:
        raise UsageError("a logits processor returned nothing", "return the logits")
    try:
        changed: FloatArray = np.asarray(logits, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a logits processor returned no array of logits: {error}") from None
    if changed.shape != shape:
        raise UsageError(f"a logits processor returned an array of shape {changed.shape}, not {shape}")
    if np.isnan(changed).any():
        raise UsageError("a logits processor returned logits that are no numbers", "use -inf to forbid a token")
    return changed


def top_two_margins(logits: FloatArray) -> list[float]:
    """Return the difference of each row's two largest logits in float32[n, V]; infinite for a vocabulary of one."""
    if logits.shape[-1] < 2:
        return [float("inf")] * len(logits)
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    logit_margins: list[float] = (top[:, 1] - top[:, 0]).tolist()
    return logit_margins


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


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return a number in [0, 1) from the arguments alone: splitmix64's finaliser over their combination."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
