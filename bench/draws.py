"""Many draws of the two tokens that follow a text, by the runtime's own drafting, cutting and verification.

A request runs until a method offers a tree. There it stays: each draw has another seed, drafts from the same state of
the drafter, and a sampler verifies the tree. Nothing is committed. The second token comes from the tree too, or else
from a plain step. Chi-square compares the tokens with the softmax of the verifier's logits (`chi_square`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from redraft.bench.chi_square import Distribution, Tally
from redraft.bench.compare import Progress
from redraft.methods import NONE
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controller import FixedBudget
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.cycle import Cycle, controller_of
from redraft.runtime.offers import Speculation
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import chain, make_tree, root_only
from redraft.types import Budget, FloatArray, OfferKind, Outcome, Tree

SPOTS = 4
"""Positions in texts that share the draws."""
MOST_STEPS = 24
"""Steps of one text in which positions are searched."""
_CACHED_BYTES = 1 << 27
_REPORTED = 1000


@dataclass
class Drawn:
    """Tokens of all positions, and what drafts brought. kinds: of the trees at the positions."""

    tally: Tally = field(default_factory=Tally)
    kinds: list[OfferKind] = field(default_factory=list)
    draws: int = 0
    drafted: int = 0
    accepted: int = 0


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
                self._draw_in(runtime, number, prompt, -(-SPOTS // len(prompts)), drawn, progress)
        return drawn

    def _draw_in(
        self, runtime: Runtime, number: int, prompt: Sequence[int], most: int, drawn: Drawn, progress: Progress
    ) -> None:  # fmt: skip
        """Draw in one text, at up to `most` positions with a kind of tree."""
        plain = self.method == NONE
        speculation = SpeculationParams(NONE)
        if not plain:
            speculation = SpeculationParams(self.method, budget=self.budget, controller=ADAPTIVE)
        params = replace(self.params, seed=self.params.seed + number)
        cycle, (seq,) = runtime.cycle([prompt], params, speculation)
        adaptive = seq.speculation
        fixed = adaptive if plain else replace(adaptive, controller=FixedBudget(self.budget))
        seq.speculation = fixed
        cycle.begin(seq, 0)
        kinds: Counter[OfferKind] = Counter()
        for _ in range(MOST_STEPS):
            if len(drawn.kinds) == SPOTS or seq.finish_reason is not None:
                return
            spot, kind = self._spot(runtime, cycle, seq, (adaptive, fixed) if len(drawn.kinds) % 2 else (fixed,))
            if kinds[kind] < most and (plain or kind is not OfferKind.NONE):
                kinds[kind] += 1
                drawn.kinds.append(kind)
                spot.draw_all(drawn, self.count // SPOTS, progress)
            spot.restore()
            seq.speculation = fixed
            cycle.step([seq])

    def _spot(
        self, runtime: Runtime, cycle: Cycle, seq: Request, speculations: Sequence[Speculation]
    ) -> tuple[_Spot, OfferKind]:
        """Return the position under the first of these speculations that drafts there, and its kind of tree."""
        for seq.speculation in speculations:
            spot = _Spot(runtime, cycle, seq, self.params)
            kind = spot.kind(self.params.seed)
            if kind is not OfferKind.NONE:
                break
            spot.restore()
        return spot, kind


class _Spot:
    """A request that stays at its position: the tokens that follow are drawn again and again."""

    def __init__(self, runtime: Runtime, cycle: Cycle, seq: Request, params: SamplingParams) -> None:
        self._verifier = runtime.verifier
        self._cycle = cycle
        self._seq = seq
        self._params = params
        self._controller = controller_of([seq])
        self._saved = seq.sampler, seq.noise, copy.copy(seq.control), _copies(seq.drafting)
        most = max(64, _CACHED_BYTES // (40 * self._verifier.vocabulary))
        self._row = lru_cache(most)(self._logits_after)
        self._after = lru_cache(most)(self._distribution_after)
        self._tree_rows = lru_cache(most)(self._tree_logits)
        self._root = self._distribution(self._logits(root_only(seq.tokens[-1]))[0])

    def restore(self) -> None:
        """Return the request to the state in which it came."""
        seq = self._seq
        seq.sampler, seq.noise, control, drafting = self._saved
        seq.control = copy.copy(control)
        seq.drafting = _copies(drafting)

    def kind(self, seed: int) -> OfferKind:
        """Return the kind of the tree that a draft of this seed has here; NONE for a root alone."""
        tree, kind = self._draft(seed)
        return kind if len(tree) > 1 else OfferKind.NONE

    def draw_all(self, drawn: Drawn, draws: int, progress: Progress) -> None:
        """Draw this many times, and count the tokens."""
        shares = np.random.default_rng(len(drawn.kinds)).random((draws, 2))
        tokens = np.empty(draws, np.int64)
        for number, (first_share, second_share) in enumerate(shares.tolist()):
            if number % _REPORTED == 0:
                progress(f"place {len(drawn.kinds)} of {SPOTS}, draw {number} of {draws}")
            tree, first, second, accepted = self._draw(self._params.seed + number + 1 + drawn.draws)
            tokens[number] = first
            uniform = self._root.uniform(first, first_share), self._after(first).uniform(second, second_share)
            drawn.tally.add_pair(*uniform)
            drawn.drafted += len(tree) - 1
            drawn.accepted += accepted
        drawn.draws += draws
        drawn.tally.add_tokens(tokens, self._root.probs)

    def _draw(self, seed: int) -> tuple[Tree, int, int, int]:
        """Return the tree of one draw, the two tokens that follow, and the number of accepted nodes."""
        tree, _ = self._draft(seed)
        tokens = self._seq.tokens
        logits = self._tree_rows(tuple(tree.tokens.tolist()), tuple(tree.parents.tolist()))
        outcome = self._verify(logits, tree, tokens)
        first, *more = outcome.tokens
        if not more:
            more = list(self._verify(self._row(first)[None], root_only(first), [*tokens, first]).tokens)
        return tree, first, more[0], len(outcome.path)

    def _draft(self, seed: int) -> tuple[Tree, OfferKind]:
        """Draft with another seed from the state at the beginning."""
        self.restore()
        seq = self._seq
        params = replace(self._params, seed=seed)
        seq.sampler, seq.noise = make_sampler(params), draft_noise(params)
        plans = self._cycle.plan(self._controller, [seq])
        (tree,), _, _ = self._cycle.draft(self._controller, [seq], plans)
        return tree, plans[0].kind

    def _verify(self, logits: FloatArray, tree: Tree, tokens: list[int]) -> Outcome:
        return self._seq.sampler.verify(logits, tree, tokens)

    def _logits(self, tree: Tree) -> FloatArray:
        (rows,) = self._verifier.logits([tree], [self._seq.cache_len])
        return rows

    def _tree_logits(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> FloatArray:
        """Return the logits of a tree. Lookups draft the same one every time."""
        return self._logits(make_tree(list(tokens), list(parents), [1.0] * len(tokens)))

    def _logits_after(self, token: int) -> FloatArray:
        """Return the logits after a token that follows the root."""
        logits: FloatArray = self._logits(chain(np.array([self._seq.tokens[-1], token])))[-1]
        return logits

    def _distribution_after(self, token: int) -> Distribution:
        """Return the distribution of the token after this one."""
        return self._distribution(self._row(token))

    def _distribution(self, logits: FloatArray) -> Distribution:
        """Return the softmax over the temperature, which is all that changes these requests' logits."""
        scores = logits.astype(np.float64) / self._params.temperature
        weights = np.exp(scores - scores.max())
        return Distribution(weights / weights.sum())


def _copies(drafting: dict[object, object]) -> dict[object, object]:
    return {drafter: copy.copy(state) for drafter, state in drafting.items()}
