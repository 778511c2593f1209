"""Drafters that predict features and tokens level by level (`redraft.methods.feature_tree`), in the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from redraft.runtime.drafters.hidden_states import HiddenStateDrafter
from redraft.runtime.requests.request import Request
from redraft.types import Budget, Tree


class FeatureTreeDrafter(HiddenStateDrafter):
    """Drafts a tree in one engine call. A tree of draws is its chain of first draws, whose distributions are kept."""

    def draft(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Tree]:
        """See `HiddenStateDrafter.draft`. The first nodes of a tree of draws are that chain."""
        chains = [
            replace(budget, nodes=min(budget.nodes, budget.depth, self.shape.steps)) if seq.noise.drawn else budget
            for seq, budget in zip(batch, budgets, strict=True)
        ]
        return super().draft(batch, chains)


DRAFTER = FeatureTreeDrafter
