"""Many draws of the two tokens that follow a text, by the runtime's own drafting, cutting and verification.

A request runs until a method offers a tree. There it stays: each draw has another seed, drafts from the same state of
the drafter, and a sampler verifies the tree. Nothing is committed. The second token comes from the tree too, or else
from a plain step. Chi-square compares the tokens with the softmax of the verifier's logits.

A token that was drawn from p becomes a uniform number: the probability of all likelier tokens, plus a random share of
its own probability (probability integral transform). So draws after different texts count in the same bins. If p is
right, numbers of successive tokens are independent.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from redraft.bench.compare import Progress
from redraft.bench.statistics import Fit, FloatArray, fit
from redraft.methods import NONE
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.loop.decode_loop import DecodeLoop
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.trees.tree import chain, make_tree, root_only
from redraft.types import Budget, IntArray, OfferKind, Tree
from redraft.types import FloatArray as Logits

SPOTS = 4
"""Positions in texts that share the draws."""
MOST_STEPS = 24
"""Steps of one text in which positions are searched."""
BINS, SIDE = 16, 4
"""Bins with equal probability of one token, and of each of two successive tokens."""
LEAST = 100
"""Expected draws of a token that has a bin of its own."""
MOST_TOKENS = 31
"""Most tokens with bins of their own after one text."""
_CACHED_BYTES = 1 << 27
_REPORTED = 1000


@dataclass
class Drawn:
    """Counts of drawn tokens by bins of their uniform numbers and in pairs, tests by token, and the drafts' counts.

    kinds: of the trees at the positions.
    """

    firsts: IntArray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    pairs: IntArray = field(default_factory=lambda: np.zeros((SIDE, SIDE), np.int64))
    by_token: list[Fit] = field(default_factory=list)
    kinds: list[OfferKind] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def draws(self) -> int:
        """The number of pairs."""
        return int(self.firsts.sum())

    def add(self, uniform: FloatArray, tokens: IntArray, probs: FloatArray) -> None:
        """Count draws after one text: the uniform numbers of both tokens [draws, 2], and the first tokens by `probs`.

        All but the likeliest first tokens share a bin.
        """
        self.firsts += np.bincount(_bins(uniform[:, 0], BINS), minlength=BINS)
        np.add.at(self.pairs, tuple(_bins(uniform, SIDE).T), 1)
        likely = np.argsort(-probs, kind="stable")[:MOST_TOKENS]
        likely = likely[probs[likely] * len(tokens) >= LEAST]
        if len(likely) and (1 - probs[likely].sum()) * len(tokens) < LEAST:
            likely = likely[:-1]  # the last one joins the others, which are too few for a bin
        if len(likely):
            counts, expected = np.bincount(tokens, minlength=len(probs))[likely], probs[likely] * len(tokens)
            rest = len(tokens) - counts.sum(), len(tokens) - expected.sum()
            self.by_token.append(fit(np.append(counts, rest[0]), np.append(expected, rest[1])))

    def fits(self) -> dict[str, Fit]:
        """Return the tests by name; none without draws."""
        if not self.draws:
            return {}
        tests = {
            name: fit(counts.ravel(), np.full(counts.size, self.draws / counts.size))
            for name, counts in (("ranks", self.firsts), ("pairs", self.pairs))
        }
        if self.by_token:
            value = sum(one.chi_square for one in self.by_token)
            tests["tokens"] = Fit(self.draws, value, sum(one.degrees_of_freedom for one in self.by_token))
        return tests


def uniform_numbers(probs: FloatArray, tokens: IntArray, shares: FloatArray) -> FloatArray:
    """Return the tokens' uniform numbers. shares: random numbers from 0 to 1."""
    order = np.argsort(-probs, kind="stable")
    before = np.empty_like(probs)
    before[order] = np.cumsum(probs[order]) - probs[order]
    numbers: FloatArray = before[tokens] + shares * probs[tokens]
    return numbers


def _bins(numbers: FloatArray, count: int) -> IntArray:
    bins: IntArray = np.minimum((numbers * count).astype(np.int64), count - 1)
    return bins


@dataclass(frozen=True)
class Draws:
    """Settings of the draws.

    params: of the draws. The seed is the first one; temperature is above 0, and nothing else changes the distribution.
    budget: of every tree. A lookup's tree is merged with its drafter's. At every second position, the adaptive
            controller chooses the trees within it, if it speculates there.
    count:  draws, shared equally by SPOTS positions.
    """

    method: str
    params: SamplingParams
    budget: Budget
    count: int

    def draw(self, runtime: Runtime, prompts: Sequence[Sequence[int]], progress: Progress) -> Drawn:
        """Draw at positions of the texts, with every kind of tree; fewer times if fewer positions are found.

        Plain decoding has no trees, so any position serves.
        """
        drawn = Drawn()
        for number, prompt in enumerate(prompts):
            if len(drawn.kinds) < SPOTS:
                params = replace(self.params, seed=self.params.seed + number)
                self._draw_in(runtime, prompt, params, -(-SPOTS // len(prompts)), drawn, progress)
        return drawn

    def _draw_in(
        self, runtime: Runtime, prompt: Sequence[int], params: SamplingParams, most: int, drawn: Drawn,
        progress: Progress,
    ) -> None:  # fmt: skip
        """Draw in one text, at up to `most` positions with a kind of tree."""
        plain = self.method == NONE
        how: dict[str, Any] = {} if plain else {"budget": self.budget, "controller": ADAPTIVE}
        (seq,) = runtime.requests([prompt], [(params, SpeculationParams(self.method, **how))])
        loop = DecodeLoop(runtime.verifier, seq.speculation)
        adaptive = seq.speculation
        fixed = adaptive if plain else replace(adaptive, controller=FixedBudget(self.budget))
        seq.speculation = fixed
        loop.add(seq)
        while seq.missing_rows and seq.finish_reason is None:
            loop.step()
        if seq.error is not None:
            raise seq.error
        kinds: Counter[OfferKind] = Counter()
        for _ in range(MOST_STEPS):
            if len(drawn.kinds) == SPOTS or seq.finish_reason is not None:
                return
            for seq.speculation in (adaptive, fixed) if len(drawn.kinds) % 2 else (fixed,):
                spot = _Spot(loop, seq, self.params)
                if (kind := spot.kind()) is not OfferKind.NONE:
                    break
                spot.restore()
            if kinds[kind] < most and (plain or kind is not OfferKind.NONE):
                kinds[kind] += 1
                drawn.kinds.append(kind)
                spot.draw_all(drawn, self.count // SPOTS, progress)
            spot.restore()
            seq.speculation = fixed
            loop.step()


class _Spot:
    """A request that stays at its position: the tokens that follow are drawn again and again."""

    def __init__(self, loop: DecodeLoop, seq: Request, params: SamplingParams) -> None:
        self._verifier = loop.verifier
        self._loop = loop
        self._seq = seq
        self._params = params
        self._saved = seq.sampler, seq.noise, copy.copy(seq.control), _copies(seq.drafting)
        most = max(64, _CACHED_BYTES // (40 * self._verifier.vocabulary))
        self._row = lru_cache(most)(self._logits_after)
        self._tree_rows = lru_cache(most)(self._tree_logits)

    def restore(self) -> None:
        """Return the request to the state in which it came."""
        seq = self._seq
        seq.sampler, seq.noise, control, drafting = self._saved
        seq.control = copy.copy(control)
        seq.drafting = _copies(drafting)

    def kind(self) -> OfferKind:
        """Return the kind of the tree that a draft has here; NONE for a root alone."""
        tree, kind = self._draft(self._params.seed)
        return kind if len(tree) > 1 else OfferKind.NONE

    def draw_all(self, drawn: Drawn, draws: int, progress: Progress) -> None:
        """Draw this many times, and count the tokens."""
        shares = np.random.default_rng(len(drawn.kinds)).random((draws, 2))
        pairs = np.empty((draws, 2), np.int64)
        before = drawn.draws
        for number in range(draws):
            if number % _REPORTED == 0:
                progress(f"place {len(drawn.kinds)} of {SPOTS}, draw {number} of {draws}")
            tree, pairs[number], accepted = self._draw(self._params.seed + number + 1 + before)
            drawn.drafted += len(tree) - 1
            drawn.accepted += accepted
        firsts, uniform = pairs[:, 0], np.empty((draws, 2))
        root = self._softmax(self._logits(root_only(self._seq.tokens[-1]))[0])
        uniform[:, 0] = uniform_numbers(root, firsts, shares[:, 0])
        for token in np.unique(firsts):
            after, rows = self._softmax(self._row(int(token))), firsts == token
            uniform[rows, 1] = uniform_numbers(after, pairs[rows, 1], shares[rows, 1])
        drawn.add(uniform, firsts, root)

    def _draw(self, seed: int) -> tuple[Tree, list[int], int]:
        """Return the tree of one draw, the two tokens that follow, and the number of accepted nodes."""
        tree, _ = self._draft(seed)
        tokens, verify = self._seq.tokens, self._seq.sampler.verify
        outcome = verify(self._tree_rows(tuple(tree.tokens.tolist()), tuple(tree.parents.tolist())), tree, tokens)
        first, *more = outcome.tokens
        if not more:
            more = list(verify(self._row(first)[None], root_only(first), [*tokens, first]).tokens)
        return tree, [first, more[0]], len(outcome.path)

    def _draft(self, seed: int) -> tuple[Tree, OfferKind]:
        """Draft with another seed from the state at the beginning."""
        self.restore()
        seq = self._seq
        params = replace(self._params, seed=seed)
        seq.sampler, seq.noise = make_sampler(params), draft_noise(params)
        batch = self._loop.scheduler.schedule()
        self._loop.draft(batch)
        (step,) = batch.steps
        return step.tree, step.plan.kind

    def _logits(self, tree: Tree) -> Logits:
        (rows,) = self._verifier.logits([tree], [self._seq.num_computed_tokens])
        return rows

    def _tree_logits(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> Logits:
        """Return the logits of a tree. Lookups draft the same one every time."""
        return self._logits(make_tree(list(tokens), list(parents), [1.0] * len(tokens)))

    def _logits_after(self, token: int) -> Logits:
        """Return the logits after a token that follows the root."""
        logits: Logits = self._logits(chain(np.array([self._seq.tokens[-1], token])))[-1]
        return logits

    def _softmax(self, logits: Logits) -> FloatArray:
        """Return the probabilities at the temperature, which is all that changes these requests' logits."""
        scores = logits.astype(np.float64) / self._params.temperature
        weights = np.exp(scores - scores.max())
        probs: FloatArray = weights / weights.sum()
        return probs


def _copies(drafting: dict[object, object]) -> dict[object, object]:
    return {drafter: copy.copy(state) for drafter, state in drafting.items()}
