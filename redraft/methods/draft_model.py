"""An independent draft model: a smaller decoder with the verifier's tokenizer drafts token by token.

Leviathan et al. 2023 and Chen et al. 2023 (speculative sampling). `redraft.methods.decoder` has what it shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft.errors import UsageError
from redraft.methods.chains import whole_tree
from redraft.methods.decoder import MOST_ROWS, MOST_WIDTH, DecoderBuild, decoder_method
from redraft.records import PositiveInt

USUAL_NODES = 32
"""Nodes of a tree without its root, unless the options name another number."""


@dataclass(frozen=True)
class DraftModelBuild(DecoderBuild):
    """Options for building a drafter.

    width: nodes expanded at each level, and candidates of a node; 1 drafts chains.
    nodes: largest tree, without its root; None takes 32, or a chain of `steps`.
    """

    width: int = 1
    nodes: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.width <= MOST_WIDTH:
            raise UsageError(f"width must be a number from 1 to {MOST_WIDTH}, not {self.width}")
        if self.width * (self.steps - 1) > MOST_ROWS and self.width > 1:
            raise UsageError(
                f"a tree of {self.steps} levels of {self.width} nodes is too large",
                f"choose steps={MOST_ROWS // self.width + 1}, or fewer",
            )

    @property
    def tree_nodes(self) -> int:
        """K, the nodes of the largest tree with the root."""
        usual = self.steps if self.width == 1 else USUAL_NODES
        return min(1 + (self.nodes or usual), whole_tree(self.steps, self.width))


METHOD = decoder_method(
    "draft_model",
    "A smaller decoder with the same tokenizer, which drafts token by token.",
    DraftModelBuild,
    takes_checkpoints=True,
    training="student",
)
