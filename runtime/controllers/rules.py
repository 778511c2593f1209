"""Rules for the length of the next draft, as pure functions. `LengthController` applies them to requests.

γ is a draft's length: the tokens of a chain, or the levels of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log

from redraft.errors import UsageError
from redraft.runtime.trees.tree import part_of
from redraft.types import Tree


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

    def update(self, average: float, drafted: int, accepted: int, room: int) -> float:
        """Return the average after a draft of `drafted` levels, of which the first `accepted` were accepted.

        room: levels that the draft could have had, whatever its length should be: tokens that are left, rows, a budget.
        """
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
    """Return the nodes of `tree` that have no ancestor in `ends`, in their old order. Such a node itself stays.

    ends: for each node, the root included, true if a draft ends after it.
    """
    parents = tree.parents.tolist()
    stays = [True] * len(parents)
    for node in range(1, len(parents)):
        stays[node] = stays[parents[node]] and not ends[parents[node]]
    return tree if all(stays) else part_of(tree, [node for node, does in enumerate(stays) if does])


def check_share(name: str, value: float) -> None:
    """Raise UsageError for an option that is not a probability."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {value}")


@dataclass(frozen=True)
class Heuristic(LengthRule):
    """Two more tokens if a whole draft was accepted, otherwise one fewer, at least one.

    This is `heuristic_transient` of transformers (Mamou et al., arXiv 2405.04304). Every request starts with `gamma`;
    transformers' `heuristic` would continue from the last request.
    """

    def update(self, average: float, drafted: int, accepted: int, room: int) -> float:
        """Return the next length. A drafter may have drafted less than the last one."""
        return drafted + 2.0 if accepted == drafted else max(1.0, average - 1)


@dataclass(frozen=True)
class Confidence(LengthRule):
    """Drafts of at most `gamma` tokens that end after the first token whose probability is below a threshold.

    This is `assistant_confidence_threshold` of transformers, with its defaults. This token is verified too, as in
    transformers, which tests a token after drafting it. With scikit-learn installed, transformers also moves its
    threshold after every step. This rule does not, as in the GammaTune paper (§5, AssistantThreshold).
    """

    gamma: int = 20
    threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)

    @property
    def confidence(self) -> float:
        return self.threshold


@dataclass(frozen=True)
class GammaTune(LengthRule):
    """GammaTune (Gautam, Shrestha, Reddy: Token-Driven GammaTune, §4.1).

    The rule keeps an exponential average γ̄ of the accepted tokens A (Eq. 8). The next draft has γ = ⌈γ̄⌉ tokens.

    If A = γ, then A ← A + δ before the average, as the text of §4.1 says. Eq. 7 and line 2 of Algorithm 1 assign
    A + δ to γ instead, which line 5 overwrites: read literally, the average could never exceed γ, and γ never grow.
    The paper has no draft that the room cuts short. If such a draft was accepted whole, γ̄ does not fall.

    The paper gives no value of eta (η), delta (δ), gamma_min and gamma_max. The defaults are among the best of
    a sweep for SmolLM2 and its student (docs/log.md), with the paper's longest draft as gamma_max.
    """

    eta: float = 0.7
    delta: int = 1
    gamma_min: int = 1
    gamma_max: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("eta", self.eta)
        if self.delta < 0:
            raise UsageError(f"delta must be at least 0, not {self.delta}")
        if not 1 <= self.gamma_min <= self.gamma_max:
            raise UsageError(
                f"gamma_min {self.gamma_min} and gamma_max {self.gamma_max}: expected 1 <= gamma_min <= gamma_max"
            )

    def length(self, average: float) -> int:
        """Return γ, which a first length may not move out of its bounds."""
        return min(self.gamma_max, max(self.gamma_min, super().length(average)))

    def update(self, average: float, drafted: int, accepted: int, room: int) -> float:
        found = float(accepted)
        if accepted == self.length(average):
            found += self.delta
        elif accepted == drafted == room:
            found = max(average, found + self.delta)
        return min(self.gamma_max, max(self.gamma_min, (1 - self.eta) * average + self.eta * found))


@dataclass(frozen=True)
class GammaTunePlus(GammaTune, Confidence):
    """GammaTune whose drafts also end after a token of low probability (§4.2), as in `confidence`.

    The paper gives no threshold (τ) either; the same sweep chose it. The first length is GammaTune's.
    """

    threshold: float = 0.7


SCALE = 0.15
"""The factor of the entropy under the root, as in the authors' code."""
MOST = 10
"""Largest threshold. The entropy of a million tokens alike is 14 nats, and its root in the rule 1.4."""


@dataclass(frozen=True)
class Svip(LengthRule):
    """SVIP (Zhang et al., arXiv 2411.18462): a draft ends where the drafter's entropy is high.

    Drafts have at most `gamma` tokens and end after the first token with √(0.15 H(q)) > threshold.

    q is the distribution from which the drafter took the token. Its entropy H needs every probability, and a tree has
    only those of its nodes. So the rule takes the largest lower bound of H that follows from them: a token without
    node is no likelier than the least likely sibling with one, so that H(q) ≥ -Σ q_i ln q_i - (1 - Σ q_i) ln min q_i
    over the siblings. For a chain this is -ln q of its token, and the rule equals `confidence` with the threshold
    exp(-h² / 0.15), 0.55 for the authors' h = 0.3. With several children a node it is closer to the entropy.
    Siblings must be the likeliest tokens of their distribution.
    """

    gamma: int = 24
    threshold: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= MOST:
            raise UsageError(f"threshold must be from 0 to {MOST}, not {self.threshold}")

    @property
    def most_entropy(self) -> float:
        """The largest entropy, in nats, that does not end a draft."""
        return self.threshold**2 / SCALE

    @property
    def confidence(self) -> float:
        """The probability under which the entropy at a chain's token is too large. Siblings may make it smaller."""
        return exp(-self.most_entropy) if self.width == 1 else 0.0

    def stop(self, tree: Tree) -> Tree:
        """Return the draft up to the first tokens from a distribution of high entropy."""
        entropies = least_entropies(tree)
        return up_to(tree, [node > 0 and entropies[parent] > self.most_entropy
                            for node, parent in enumerate(tree.parents.tolist())])  # fmt: skip


def least_entropies(tree: Tree) -> list[float]:
    """Return a lower bound of the entropy, in nats, of the distribution after each node; 0 for a leaf."""
    log_probs, parents = tree.log_probs.tolist(), tree.parents.tolist()
    known, least, entropies = [0.0] * len(parents), [0.0] * len(parents), [0.0] * len(parents)
    for node in range(1, len(parents)):
        parent = parents[node]
        log_prob = log_probs[node] - log_probs[parent]
        known[parent] += exp(log_prob)
        least[parent] = min(least[parent], log_prob)
        entropies[parent] -= exp(log_prob) * log_prob
    rests = [max(1 - share, 0.0) for share in known]
    return [entropy - rest * log_prob for entropy, rest, log_prob in zip(entropies, rests, least, strict=True)]
