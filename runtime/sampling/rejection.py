"""Rejection sampling: accepts drafted tokens with probabilities that keep the verifier's distribution.

p is the verifier's processed distribution after a node, q the drafter's, from which the node's children were drawn.

- Chains: accept a drawn x with min(1, p(x) / q(x)), otherwise draw from norm(max(0, p - q)). Leviathan et al. 2023,
  Algorithm 1; Chen et al. 2023, Algorithm 2.
- Trees: try the children of a node one after another, each against the residual that the one before left. Miao et al.
  2024 (SpecInfer), Algorithm 2. Draws without replacement are draws from q without the earlier siblings, renormalised.
- Chosen candidates, such as n-grams, carry no q. Candidate x is accepted with p(x), and the residual is p without x.
- Block verification: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", Algorithm 2. It decides on
  a chain as a whole, and accepts at least as many tokens on average.

All this needs trees whose stop and cut do not depend on draws that were dropped (`redraft.types.Draws`). The random
numbers of these decisions must be independent of those of the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.noise_spec import ACCEPTANCE
from redraft.runtime.params import BLOCK, SamplingParams
from redraft.runtime.sampling.noise import row_key
from redraft.runtime.sampling.path_sampler import PathSampler
from redraft.runtime.sampling.processors import Processor
from redraft.runtime.sampling.truncation import Support, support_of
from redraft.runtime.trees.tree import is_chain, layout
from redraft.types import NOT_REACHED, FloatArray, Outcome, Tree

Probs = NDArray[np.float64]
"""A distribution over the full vocabulary, [V]."""
Target = Callable[[int], Probs | None]
"""p after a node; None if no token may follow it. Calls come from the root down, each node after its parent."""
Accepted = tuple[tuple[int, ...], int]
"""The accepted nodes in order, without the root, and the token after the last of them; NOT_REACHED if none may be."""


class Chance(Protocol):
    """The random decisions of a verification. Tests replace them to enumerate every outcome."""

    def accepts(self, probability: float) -> bool:
        """Return true with this probability."""

    def draw(self, probs: Probs) -> int:
        """Return a token with this distribution."""


def verify(tree: Tree, target: Target, chance: Chance, block: bool) -> Accepted:
    """Verify a tree node by node; with `block`, as a block if it is a chain of nodes all chosen or all drawn.

    Which of the two verifies a tree may not depend on its draws. So a tree of draws and chosen nodes is never a block:
    it is a chain for some draws only.
    """
    whole = tree.draws is None or not tree.draws.chosen[1:].any()
    return (verify_block if block and whole and is_chain(tree) else verify_tree)(tree, target, chance)


def verify_tree(tree: Tree, target: Target, chance: Chance) -> Accepted:
    """Go from the root to the first node without an accepted child, and draw the next token there.

    `target` is called for accepted nodes only.
    """
    path: list[int] = []
    node = 0
    while (p := target(node)) is not None:
        child, left = try_children(tree, node, p, chance)
        if child is None:
            return tuple(path), chance.draw(left)
        path.append(child)
        node = child
    return tuple(path), NOT_REACHED


def try_children(tree: Tree, node: int, p: Probs, chance: Chance) -> tuple[int | None, Probs]:
    """Return the accepted child of a node, or None and the distribution of the token that replaces all children.

    Chosen children come first, in their order, then the drawn ones in the order of their draws. A child that is both
    is tried twice: only then is the residual right for every value that the draw could have had.
    """
    chosen, drawn = candidates(tree, node)
    for child in chosen:
        token = int(tree.tokens[child])
        if chance.accepts(float(p[token])):
            return child, p
        p = without(p, token)
    if drawn:
        assert tree.draws is not None
        q = drawn_from(tree, node, len(p))
        for child in drawn:
            token = int(tree.tokens[child])
            if chance.accepts(acceptance(p, q, token)):
                return child, p
            p = residual(p, q)
            q = q if tree.draws.repeats else without(q, token)
    return None, p


def candidates(tree: Tree, node: int) -> tuple[list[int], list[int]]:
    """Return the children of a node that were chosen, and those that were drawn, each in the order of trial."""
    children = np.flatnonzero(tree.parents == node)
    draws = tree.draws
    if draws is None:
        return children.tolist(), []
    drawn = children[draws.order[children] >= 0]
    return children[draws.chosen[children]].tolist(), drawn[np.argsort(draws.order[drawn])].tolist()


def drawn_from(tree: Tree, node: int, vocabulary: int) -> Probs:
    """Return the distribution from which a node's first child was drawn, over the full vocabulary."""
    assert tree.draws is not None
    proposal = tree.draws.proposal
    logits = proposal.logits(int(layout(tree.parents).depths[node]), int(tree.tokens[node])).astype(np.float64)
    q: Probs = np.exp(logits - logits.max())
    q /= q.sum()
    if proposal.tokens is None:
        return q
    full = np.zeros(vocabulary)
    full[proposal.tokens] = q
    return full


def acceptance(p: Probs, q: Probs, token: int) -> float:
    """Return min(1, p / q) of a token that was drawn from q."""
    return min(1.0, _ratio(p, q, token))


def _ratio(p: Probs, q: Probs, token: int) -> float:
    """Return p / q of a token. Its q can be 0 by rounding only."""
    if q[token] > 0:
        return float(p[token] / q[token])
    return float("inf") if p[token] > 0 else 0.0


def residual(p: Probs, q: Probs) -> Probs:
    """Return norm(max(0, p - q)): the distribution after a token drawn from q was rejected."""
    return _normalised(np.maximum(p - q, 0), p)


def without(p: Probs, token: int) -> Probs:
    """Return the distribution without a token."""
    left = p.copy()
    left[token] = 0
    return _normalised(left, p)


def _normalised(weights: Probs, otherwise: Probs) -> Probs:
    """Return weights with sum 1. Weights of 0 follow a rejection that only rounding allows: then return the other."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise


def verify_block(chain: Tree, target: Target, chance: Chance) -> Accepted:
    """Verify a chain as a block: keep its longest part that is accepted (Sun et al. 2024, Algorithm 2).

    `target` is called for every node up to the first that p excludes. Random numbers that drew later tokens of a chain
    decide about earlier ones here, so a drafter must not use them again. Nodes must be all chosen or all drawn.
    """
    weight, taken = 1.0, 0
    rest: Probs | None = None
    for node in range(len(chain)):
        p = target(node)
        if p is None:
            taken, rest = (node, None) if node == 0 or chance.accepts(weight) else (taken, rest)
            break
        token = int(chain.tokens[node + 1]) if node + 1 < len(chain) else None
        q = _next_draw(chain, node, token, len(p))
        excess = np.maximum(weight * p - q, 0)
        total = float(excess.sum())
        left = total + 1 - weight
        if node == 0 or chance.accepts(min(1.0, total / left) if left > 0 else 1.0):
            taken, rest = node, _normalised(excess, p)
        if token is None:
            break
        weight = min(1.0, weight * _ratio(p, q, token))
        if weight == 0:
            break
    return tuple(range(1, taken + 1)), NOT_REACHED if rest is None else chance.draw(rest)


def _next_draw(chain: Tree, node: int, token: int | None, vocabulary: int) -> Probs:
    """Return the distribution of the node after `node`: 1 for a chosen token, and 0 everywhere after the last node."""
    if token is not None and chain.draws is not None:
        return drawn_from(chain, node, vocabulary)
    q = np.zeros(vocabulary)
    if token is not None:
        q[token] = 1
    return q


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


class Rejection(PathSampler):
    """Accepts candidates with the probabilities of `rejection`.

    Node by node, the processors run for accepted nodes only. Block verification needs the distributions of all nodes.
    """

    def __init__(
        self, params: SamplingParams, processors: Sequence[Processor] = (), record_logit_margins: bool = False
    ) -> None:
        super().__init__(params, processors, record_logit_margins)
        self._seed = None  # margins have no noise

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
