"""Exact distributions of speculative decoding on a tiny vocabulary, by enumerating every draw and every decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np

from redraft.runtime.sampling.rejection import Accepted, Chance, Probs, Target, verify_tree
from redraft.runtime.trees.tree import layout
from redraft.types import DraftTree, Draws, Tree

VOCABULARY = 3
Law = dict[tuple[int, ...], float]
"""Probability of each text."""
Model = Callable[[tuple[int, ...]], Probs]
"""A distribution after each text."""
Verify = Callable[[Tree, Target, Chance], Accepted]


def model(seed: int, vocabulary: int = VOCABULARY, sharp: float = 1.0) -> Model:
    """Return a model with random distributions, another one after every text."""

    @cache
    def after(text: tuple[int, ...]) -> Probs:
        weights = np.random.default_rng([seed, *text]).gamma(1 / sharp, size=vocabulary) + 1e-3
        return weights / weights.sum()

    return after


class Branches:
    """A `Chance` that follows a list of decisions and then takes the first one of each kind, with its probability."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.options: list[int] = []
        self.probability = 1.0

    def accepts(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        return bool(self._take([1 - probability, probability]))

    def draw(self, probs: Probs) -> int:
        return self._take(probs.tolist())

    def _take(self, shares: list[float]) -> int:
        place = len(self.options)
        if place == len(self.decisions):
            self.decisions.append(0)
        self.options.append(len(shares))
        self.probability *= shares[self.decisions[place]]
        return self.decisions[place]


def every_branch(run: Callable[[Chance], Accepted]) -> Iterator[tuple[float, Accepted]]:
    """Yield the result of every sequence of decisions, with its probability."""
    decisions: list[int] = []
    while True:
        chance = Branches(decisions)
        result = run(chance)
        if chance.probability > 0:
            yield chance.probability, result
        while decisions and decisions[-1] + 1 == chance.options[len(decisions) - 1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] += 1


def closed_form(p: Model, length: int, vocabulary: int = VOCABULARY) -> Law:
    """Return the distribution of plain decoding."""
    return {text: joint(p, (), text) for text in product(range(vocabulary), repeat=length)}


def joint(p: Model, before: tuple[int, ...], text: Sequence[int]) -> float:
    found = 1.0
    for place, token in enumerate(text):
        found *= p((*before, *text[:place]))[token]
    return found


def texts_of(tree: Tree) -> list[tuple[int, ...]]:
    """Return the text of each node's path, without the root."""
    texts: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents.tolist()[1:], 1):
        texts.append((*texts[parent], int(tree.tokens[node])))
    return texts


def outputs(tree: Tree, p: Model, verify: Verify = verify_tree) -> Law:
    """Return the distribution of the tokens that one verification of a tree adds."""
    texts, law = texts_of(tree), defaultdict(float)

    def target(node: int) -> Probs:
        return p(texts[node])

    for share, (path, token) in every_branch(lambda chance: verify(tree, target, chance)):
        assert all(tree.parents[child] == parent for parent, child in pairwise((0, *path)))
        law[(*texts[path[-1] if path else 0], token)] += share
    return law


class Proposed:
    """A `redraft.types.Proposal` with given distributions. They depend on depth and token of a node."""

    def __init__(self, q: Model, tokens: np.ndarray | None = None) -> None:
        self.tokens = tokens
        self.q = q

    def logits(self, depth: int, token: int) -> np.ndarray:
        return np.log(self.q((depth, token)))


def drawn_trees(
    q: Model, parents: Sequence[int], repeats: bool = False, vocabulary: int = VOCABULARY
) -> Iterator[tuple[float, DraftTree]]:
    """Yield every tree of one shape whose nodes are drawn from q, in their order, with its probability."""
    inner = sorted(set(parents[1:]))
    depths = layout(np.array(parents)).depths
    for taken in product(*(_siblings(parents[1:].count(node), repeats, vocabulary) for node in inner)):
        rest = {node: list(tokens) for node, tokens in zip(inner, taken, strict=True)}
        tokens = [0]
        for parent in parents[1:]:
            tokens.append(rest[parent].pop(0))
        share = 1.0
        for node, siblings in zip(inner, taken, strict=True):
            left = q((int(depths[node]), tokens[node])).copy()
            for token in siblings:
                share *= left[token] / left.sum()
                left[token] *= repeats
        yield share, draft(tokens, parents, q, repeats)


def _siblings(count: int, repeats: bool, vocabulary: int) -> list[tuple[int, ...]]:
    ways = product(range(vocabulary), repeat=count) if repeats else permutations(range(vocabulary), count)
    return list(ways)


def draft(tokens: list[int], parents: Sequence[int], q: Model, repeats: bool = False) -> DraftTree:
    """Return a tree of draws. Log-probabilities are those of the drawn tokens, which no cut may read."""
    order, depths = np.arange(-1, len(tokens) - 1), layout(np.array(parents)).depths
    log_probs = np.zeros(len(tokens), np.float32)
    for node, parent in enumerate(parents[1:], 1):
        log_probs[node] = log_probs[parent] + np.log(q((int(depths[parent]), tokens[parent]))[tokens[node]])
    return DraftTree(np.array(tokens), np.array(parents), log_probs, Draws(Proposed(q), order, order < 0, repeats))


def chosen(paths: Sequence[Sequence[int]]) -> DraftTree:
    """Return the tree of these texts, as a lookup chooses them."""
    tokens, parents, known = [0], [-1], {(): 0}
    for path in paths:
        for end in range(1, len(path) + 1):
            text = tuple(path[:end])
            if text not in known:
                known[text] = len(tokens)
                tokens.append(path[end - 1])
                parents.append(known[text[:-1]])
    return DraftTree(np.array(tokens), np.array(parents), np.array([-float(len(t)) for t in known], np.float32))


def law_of(trees: Iterator[tuple[float, Tree]], p: Model, length: int, verify: Verify = verify_tree) -> Law:
    """Return the distribution of texts of this length: a verification, and then plain decoding."""
    law: Law = defaultdict(float)
    for share, tree in trees:
        for text, probability in outputs(tree, p, verify).items():
            for end in product(range(len(p(()))), repeat=max(length - len(text), 0)):
                law[(*text, *end)[:length]] += share * probability * joint(p, text, end)
    return law


def farthest(law: Law, other: Law) -> float:
    """Return the largest difference of two distributions, over all texts."""
    return max(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in {*law, *other})
