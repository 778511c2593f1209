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

import numpy as np

from redraft.bench.chi_square import Distribution, Tally
from redraft.bench.turns import Report
from redraft.methods import NONE
from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controller import FixedBudget
from redraft.runtime.controllers import ADAPTIVE
from redraft.runtime.cycle import Cycle, controller_of
from redraft.runtime.offers import Speculation
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.steps import LruCache
from redraft.runtime.tree import chain, root_only
from redraft.types import Budget, FloatArray, OfferKind, Outcome, Tree

PLACES = 4
"""Places in texts that share the draws."""
MOST_STEPS = 24
"""Steps of one text in which a place is searched."""
_STORED_BYTES = 1 << 27
_REPORTED = 1000


@dataclass
class Drawn:
    """Tokens of all places, and what drafts brought. kinds: of the trees at the places."""

    tally: Tally = field(default_factory=Tally)
    kinds: list[OfferKind] = field(default_factory=list)
    draws: int = 0
    drafted: int = 0
    accepted: int = 0


def draw(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    method: str,
    budget: Budget,
    draws: int,
    report: Report = lambda message: None,
) -> Drawn:
    """Draw `draws` times, shared equally by PLACES places: of each text, places with every kind of tree.

    params: of the draws. The seed is the first one; temperature is above 0, and nothing else changes the distribution.
    budget: of every tree. A lookup's tree is merged with its drafter's. At every second place, the adaptive controller
            chooses the trees within it, if it speculates there.
    Plain decoding has no trees, so any place serves. If fewer places are found, there are fewer draws.
    """
    found = Drawn()
    plain = method == NONE
    how = SpeculationParams(NONE) if plain else SpeculationParams(method, budget=budget, controller=ADAPTIVE)
    most = -(-PLACES // len(prompts))  # of one kind in one text
    for number, prompt in enumerate(prompts):
        if len(found.kinds) == PLACES:
            break
        cycle, (seq,) = runtime.cycle([prompt], replace(params, seed=params.seed + number), how)
        fixed = seq.speculation if plain else replace(seq.speculation, controller=FixedBudget(budget))
        both = seq.speculation, fixed
        seq.speculation = fixed
        cycle.begin(seq, 0)
        kinds: Counter[OfferKind] = Counter()
        for _ in range(MOST_STEPS):
            if len(found.kinds) == PLACES or seq.finish_reason is not None:
                break
            place, kind = _place(runtime, cycle, seq, params, both if len(found.kinds) % 2 else (fixed,))
            if kinds[kind] < most and (plain or kind is not OfferKind.NONE):
                kinds[kind] += 1
                found.kinds.append(kind)
                _draw_at(place, found, draws // PLACES, report)
            place.restore()
            seq.speculation = fixed
            cycle.step([seq])
    return found


def _place(
    runtime: Runtime, cycle: Cycle, seq: Request, params: SamplingParams, speculations: Sequence[Speculation]
) -> tuple[_Place, OfferKind]:
    """Return the request as a place under the first of these speculations that drafts there, and the tree's kind."""
    for seq.speculation in speculations:
        place = _Place(runtime, cycle, seq, params)
        kind = place.kind(params.seed)
        if kind is not OfferKind.NONE:
            break
        place.restore()
    return place, kind


def _draw_at(place: _Place, found: Drawn, draws: int, report: Report) -> None:
    shares = np.random.default_rng(len(found.kinds)).random((draws, 2))
    tokens = np.empty(draws, np.int64)
    for number, (first_share, second_share) in enumerate(shares.tolist()):
        if number % _REPORTED == 0:
            report(f"place {len(found.kinds)} of {PLACES}, draw {number} of {draws}")
        tree, first, second, accepted = place.draw(place.seed + number + 1 + found.draws)
        tokens[number] = first
        after = place.after(first)
        found.tally.add_pair(place.root.uniform(first, first_share), after.uniform(second, second_share))
        found.drafted += len(tree) - 1
        found.accepted += accepted
    found.draws += draws
    found.tally.add_tokens(tokens, place.root.probs)


class _Place:
    """A request at rest: what follows its tokens is drawn again and again."""

    def __init__(self, runtime: Runtime, cycle: Cycle, seq: Request, params: SamplingParams) -> None:
        self.seed = params.seed
        self._verifier = runtime.verifier
        self._cycle = cycle
        self._seq = seq
        self._params = params
        self._controller = controller_of([seq])
        self._kept = seq.sampler, seq.noise, copy.copy(seq.control), _copies(seq)
        stored = max(64, _STORED_BYTES // (40 * self._verifier.vocabulary))
        self._rows: LruCache[int, FloatArray] = LruCache(stored)
        self._distributions: LruCache[int, Distribution] = LruCache(stored)
        self._trees: LruCache[tuple[bytes, bytes], FloatArray] = LruCache(stored)
        (logits,) = self._logits(root_only(seq.tokens[-1]))
        self.root = self._distribution(logits)

    def restore(self) -> None:
        """Return the request to the state in which it came."""
        seq = self._seq
        seq.sampler, seq.noise, control, drafting = self._kept
        seq.control = copy.copy(control)
        seq.drafting = {drafter: copy.copy(state) for drafter, state in drafting.items()}

    def kind(self, seed: int) -> OfferKind:
        """Return the kind of the tree that a draft of this seed has here; NONE for a root alone."""
        tree, kind = self._tree(seed)
        return kind if len(tree) > 1 else OfferKind.NONE

    def draw(self, seed: int) -> tuple[Tree, int, int, int]:
        """Return the tree of one draw, the two tokens that follow, and the number of accepted nodes."""
        tree, _ = self._tree(seed)
        tokens = self._seq.tokens
        outcome = self._verified(self._tree_logits(tree), tree, tokens)
        first, *more = outcome.tokens
        if not more:
            again = self._verified(self._row(first)[None], root_only(first), [*tokens, first])
            more = list(again.tokens)
        return tree, first, more[0], len(outcome.path)

    def after(self, token: int) -> Distribution:
        """Return the distribution of the token after this one."""
        return self._distributions.get(token, lambda: self._distribution(self._row(token)))

    def _tree(self, seed: int) -> tuple[Tree, OfferKind]:
        """Draft with another seed from the state at the beginning."""
        self.restore()
        seq = self._seq
        one = replace(self._params, seed=seed)
        seq.sampler, seq.noise = make_sampler(one), draft_noise(one)
        plans = self._cycle.plan(self._controller, [seq])
        (tree,), _, _ = self._cycle.draft(self._controller, [seq], plans)
        return tree, plans[0].kind

    def _verified(self, logits: FloatArray, tree: Tree, tokens: list[int]) -> Outcome:
        return self._seq.sampler.verify(logits, tree, tokens)

    def _logits(self, tree: Tree) -> FloatArray:
        (rows,) = self._verifier.logits([tree], [self._seq.cache_len])
        return rows

    def _tree_logits(self, tree: Tree) -> FloatArray:
        """Return the logits of a tree. Lookups draft the same one every time."""
        key = tree.tokens.tobytes(), tree.parents.tobytes()
        return self._trees.get(key, lambda: self._logits(tree))

    def _row(self, token: int) -> FloatArray:
        """Return the logits after a token that follows the root."""
        row = self._rows.get(token)
        if row is None:
            row = self._rows.add(token, self._logits(chain(np.array([self._seq.tokens[-1], token])))[-1])
        return row

    def _distribution(self, logits: FloatArray) -> Distribution:
        """Return the softmax over the temperature, which is all that changes these requests' logits."""
        scores = logits.astype(np.float64) / self._params.temperature
        weights = np.exp(scores - scores.max())
        return Distribution(weights / weights.sum())


def _copies(seq: Request) -> dict[object, object]:
    return {drafter: copy.copy(state) for drafter, state in seq.drafting.items()}
