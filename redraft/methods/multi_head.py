"""Meta's multi-token prediction: heads of one layer each on the verifier's trunk draft several tokens at once.

Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", section 2. The verifier's
layers but the last are the trunk, and its last layer is the head of the next token. Head i of the drafter is one more
layer of this form: it reads the trunk's output at all positions up to t, and predicts the token at t + 1 + i, through
the verifier's final norm and head. No head reads another one's token, so the candidates form a static tree (section 3.2
decodes with them; `redraft.methods.static_tree` has the tree).

The layers have the same rows and positions. So they attend as one layer with the attention heads of all of them, and
their keys and values share one KV buffer. A draft appends the rows that were accepted since the last one.

Symbols: N levels, K nodes with the root. `redraft.signatures`, `redraft.methods.base` and `.chains` have the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft import names
from redraft.methods.base import Method
from redraft.methods.chains import chain_state, draft_graph, draft_vocabulary_tables
from redraft.methods.static_tree import StaticTreeBuild, StaticTreeShape, describe, looked_up, tree_limits
from redraft.names import DRAFT
from redraft.records import PositiveInt


@dataclass(frozen=True, kw_only=True)
class MultiHeadShape(StaticTreeShape):
    """Sizes of the drafter's graph and buffers.

    kv_heads: key/value heads of all N layers.   head_dim: numbers of a head.
    hidden_states: of the verifier, the one that the heads read: the output of its last layer but one.
    """

    kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden_states: tuple[str, ...]


METHOD: Method[MultiHeadShape] = Method(
    id="multi_head",
    hidden_states=("0",),
    rows="all",
    graphs={DRAFT: draft_graph(looked_up, chain_steps=lambda shape: 1)},
    shape=MultiHeadShape,
    state=chain_state,
    spare_rows=names.CATCH_UP_ROWS,
    tables=draft_vocabulary_tables,
    limits=tree_limits,
    describe=describe,
    build_options=StaticTreeBuild,
)
"""The graph reads only the last pending token."""
