"""A sampler by rejection, for candidates that were drawn from the drafter's distribution or chosen without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.errors import UsageError
from redraft.noise_spec import ACCEPTANCE
from redraft.runtime.params import BLOCK, SamplingParams
from redraft.runtime.sampling.coupled import Likeliest
from redraft.runtime.sampling.noise import row_key
from redraft.runtime.sampling.processors import Processor
from redraft.runtime.sampling.rejection import Probs, verify
from redraft.runtime.sampling.truncation import Support, support_of
from redraft.runtime.sampling.walk import Walk
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree


class Uniforms:
    """Random decisions of one step, a function of the request's seed and the position of the step's first token.

    No two steps of a request have the same position. The numbers are independent of those that drew the candidates.
    """

    def __init__(self, seed: int, position: int) -> None:
        key = np.array(row_key(seed, position, ACCEPTANCE), np.uint64)
        self._next = np.random.Generator(np.random.Philox(key=key)).random

    def accepts(self, probability: float) -> bool:
        """Return true with this probability."""
        return self._next() < probability

    def draw(self, probs: Probs) -> int:
        """Return a token with this distribution."""
        tokens = np.flatnonzero(probs)
        upper = probs[tokens].cumsum()
        place = int(np.searchsorted(upper, self._next() * upper[-1], side="right"))
        return int(tokens[min(place, len(tokens) - 1)])  # rounding may reach the sum


class Rejection(Walk):
    """Accepts candidates with the probabilities of `rejection`.

    Node by node, the processors run for accepted nodes only. Block verification needs the distributions of all nodes.
    """

    def __init__(
        self, params: SamplingParams, processors: Sequence[Processor] = (), record_logit_margins: bool = False
    ) -> None:
        super().__init__(params, processors, record_logit_margins)
        self._choose = Likeliest()  # for margins

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        """Accept nodes of the tree and draw the token after them. If no token may follow, the outcome has the error."""
        self._advance(tokens[self._length :])
        reached = _Reached(self._params, self._processors, self._states, logits, tree)
        chance = Uniforms(self._params.seed, self._length)
        path, bonus = verify(tree, reached.target, chance, self._params.acceptance == BLOCK)
        nodes, found = (0, *path), (*tree.tokens[list(path)].tolist(), bonus)
        targets = self._guesses(logits, tree, len(tokens))
        for node, token in zip(nodes, found, strict=True):
            targets[node] = token
            if token != NOT_REACHED:
                self._record(reached.supports[node], reached.supports[node].place(token))
        self._length += len(path)
        self._states = reached.states[nodes[-1]]
        if bonus != NOT_REACHED:
            return Outcome(targets, path, bonus, found)
        return Outcome(targets, path, bonus, found[:-1], self._failure(reached.errors[nodes[-1]]))


class _Reached:
    """The nodes that a verification reached: processors' states, tokens that may be drawn, and errors, by node."""

    def __init__(
        self, params: SamplingParams, processors: Sequence[Processor], states: list[Any], logits: FloatArray, tree: Tree
    ) -> None:
        self.states = {0: states}
        self.supports: dict[int, Support] = {}
        self.errors: dict[int, UsageError] = {}
        self._params, self._processors, self._logits, self._tree = params, processors, logits, tree

    def target(self, node: int) -> Probs | None:
        """Return the processed distribution after a node, whose parent was reached; None if no token may follow."""
        states = self.states.get(node)
        row = self._logits[node].copy()
        try:
            if states is None:
                states = self.states[node] = self._advanced(node)
            for processor, state in zip(self._processors, states, strict=True):
                row = processor.process(state, row)
            support = self.supports[node] = support_of(row, self._params)
        except UsageError as error:
            self.states.setdefault(node, [])
            self.errors[node] = error
            return None
        return support.probs(self._logits.shape[1])

    def _advanced(self, node: int) -> list[Any]:
        token, before = int(self._tree.tokens[node]), self.states[int(self._tree.parents[node])]
        return [one.advance(state, token) for one, state in zip(self._processors, before, strict=True)]
