"""Rules for the length of the next draft, as pure functions. `LengthController` applies them to requests.

γ is a draft's length: the tokens of a chain, or the levels of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from redraft.errors import UsageError
from redraft.types import DraftTree, Tree


@dataclass(frozen=True)
class LengthRule:
    """Drafts of a fixed length, and the base of all other rules.

    The state of a rule is one number, the average length; a draft is as long as the next whole number.

    gamma: length of a request's first draft.   width: most nodes of a level; 1 drafts chains.
    """

    gamma: int = 5
    width: int = 1

    def __post_init__(self) -> None:
        for name in ("gamma", "width"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def confidence(self) -> float:
        """A node ends the draft if its probability, given its parent, is below this; 0 if none does."""
        return 0.0

    def length(self, average: float) -> int:
        """Return γ, the length of the next draft."""
        return ceil(average)

    def update(self, average: float, drafted: int, accepted: int) -> float:
        """Return the average after a draft of `drafted` levels, of which the first `accepted` were accepted."""
        return average

    def stop(self, tree: Tree) -> Tree:
        """Return the part of a draft up to the nodes that end it, which stay."""
        return confident(tree, self.confidence)


def confident(tree: Tree, threshold: float) -> Tree:
    """Return the nodes whose ancestors all have at least this probability, given their parents."""
    if threshold <= 0:
        return tree
    least = log(threshold)
    log_probs, parents = tree.log_probs.tolist(), tree.parents.tolist()
    return up_to(tree, [log_probs[node] - log_probs[parent] < least if node else False
                        for node, parent in enumerate(parents)])  # fmt: skip


def up_to(tree: Tree, ends: list[bool]) -> Tree:
    """Return the nodes of `tree` that have no ancestor in `ends`, in their old order. Such a node itself is kept.

    ends: for each node, the root included, true if a draft ends after it.
    """
    parents = tree.parents.tolist()
    place = [0] + [-1] * (len(parents) - 1)
    kept = [0]
    for node in range(1, len(parents)):
        parent = parents[node]
        if place[parent] >= 0 and not ends[parent]:
            place[node] = len(kept)
            kept.append(node)
    if len(kept) == len(parents):
        return tree
    new_parents = tree.parents[kept]
    new_parents[1:] = [place[parents[node]] for node in kept[1:]]
    return DraftTree(tree.tokens[kept], new_parents, tree.log_probs[kept])


def check_share(name: str, value: float) -> None:
    """Raise UsageError for an option that is not a probability."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {value}")
