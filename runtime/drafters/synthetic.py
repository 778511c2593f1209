"""Forced acceptance, to measure speed without a trained drafter. The text is meaningless, and labelled as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redraft.errors import UsageError
from redraft.runtime.drafters.base import TreeMaker
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import uniform
from redraft.runtime.sampling.sampler import Sampler, accept
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.tree import make_tree, prune
from redraft.types import Budget, FloatArray, Outcome, Tree

LABEL = "[synthetic acceptance] "
"""Prefix of the text of such a run."""
_LEAST = 1e-6


@dataclass(frozen=True)
class Acceptance:
    """`by_depth[d]`: probability that a node at depth d + 1 is accepted if its parent is, 0 for deeper nodes."""

    by_depth: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_depth", tuple(self.by_depth))
        if not self.by_depth or not all(0 <= share <= 1 for share in self.by_depth):
            raise UsageError(f"synthetic acceptance must be probabilities by depth, not {self.by_depth}")


class SyntheticDrafter(TreeMaker):
    """Trees of the requested shape at no cost. Each level has `width` children of the first node of the level above.

    First children have their forced probability, their siblings nearly none.
    """

    def __init__(self, verifier: Verifier, acceptance: Acceptance) -> None:
        super().__init__(verifier)
        self._shares = acceptance.by_depth

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        return [self._tree(seq.tokens[-1], budget) for seq, budget in zip(batch, budgets, strict=True)]

    def _tree(self, token: int, budget: Budget) -> Tree:
        tokens, parents, probs = [token], [-1], [1.0]
        above = 0
        for share in self._shares[: budget.depth]:
            first = len(tokens)
            for rank in range(budget.width):
                tokens.append(rank)
                parents.append(above)
                probs.append(max(probs[above] * share, _LEAST) if rank == 0 else _LEAST)
            above = first
        return prune(make_tree(tokens, parents, probs), budget.nodes)


class SyntheticAcceptance(Sampler):
    """A sampler that accepts the first child at each depth with its forced probability.

    Random numbers depend on the request's seed and the token's position.
    """

    def __init__(self, acceptance: Acceptance, seed: int) -> None:
        self._shares = acceptance.by_depth
        self._seed = seed

    def verify(self, logits: FloatArray, tree: Tree, tokens: Sequence[int]) -> Outcome:
        return accept(tree, self.sample_likeliest(logits.argmax(axis=-1).tolist(), tree, tokens))

    def sample_likeliest(self, likeliest: Sequence[int], tree: Tree, tokens: Sequence[int]) -> list[int]:
        """Return the forced token after every node. The last accepted node gets a token that no child has."""
        target_token_ids = list(likeliest)
        ids, parents = tree.tokens.tolist(), tree.parents.tolist()
        position, last = len(tokens) - 1, 0
        for depth in range(len(parents)):
            children = [node for node in range(last + 1, len(parents)) if parents[node] == last]
            accepted = depth < len(self._shares) and uniform(self._seed, position + depth) < self._shares[depth]
            if not children or not accepted:
                drafted = {ids[node] for node in children}
                if target_token_ids[last] in drafted:
                    target_token_ids[last] = next(token for token in range(len(drafted) + 1) if token not in drafted)
                break
            target_token_ids[last] = ids[children[0]]
            last = children[0]
        return target_token_ids
