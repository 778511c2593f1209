"""Logits processors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redraft.errors import UsageError
from redraft.runtime.params import LogitsProcessor
from redraft.runtime.sampling.sampler import Sampler
from redraft.types import FloatArray, Outcome, Tree


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
