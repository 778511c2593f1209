"""Names, element types and symbolic shapes of every tensor that crosses a graph's boundary: their one home.

Symbols: B sequences in the call, T tokens verified at once, R rows whose logits are wanted, C capacity of the KV
buffers in rows, V vocabulary, n hidden size, H_kv key/value heads, D head size. Of a drafter: M rows that it catches up
on, N steps of its chain, K nodes of its tree (root included), H hot tokens, d rank of the token information.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from redraft.config import Precision, TokenInfo

Dtype = Literal["int64", "int32", "bool", "int8", "uint8", "float32", "float16", "bfloat16"]
ELEMENTS: dict[Precision, Dtype] = {
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "float32", "int4": "float32", "fp8": "float16",
}  # fmt: skip
"""Element type of KV buffers, features and unquantized weights by precision. Logits are float32 always."""

Dim = int | str
"""A fixed size, or the name of a symbol that the caller chooses per call."""

VERIFIER = "verifier"
"""The verifier's graph, any batch, standard operators only."""
VERIFIER_SINGLE = "verifier.single"
"""The same graph lowered for one sequence on ONNX Runtime's CPU kernels (absent where they do not fit the model)."""

LYANNA = "lyanna"
"""The drafting method: on the command line, in a drafter's configuration and in a bundle."""
LYANNA_DRAFT = f"{LYANNA}.draft"
"""Lyanna's chain, its logits and the tree of them (Algorithm 1), any batch."""
LYANNA_DRAFT_SINGLE = f"{LYANNA_DRAFT}.single"
"""The same graph lowered for one sequence, as `VERIFIER_SINGLE` is."""
LYANNA_RESAMPLE = f"{LYANNA}.resample"
"""A new tree from logits that the last draft left over (Algorithm 2), any batch."""

STEP_LAYOUT = "step.layout"
"""What a tree's tokens and parents become for the verifier, on the device."""
STEP_ACCEPT = "step.accept"
"""What the verifier's logits accept of a tree, on the device."""
STEP_KEEP = "step.keep"
"""Rows of the accepted path made contiguous in all KV buffers, by standard operators."""
STEP_COLLECT = "step.collect"
"""Feature rows of the accepted path, appended to those that wait for a drafter."""
STEP_MOVE = "step.move"
"""One sequence's KV rows copied to another slot."""
LYANNA_MOVE = "lyanna.move"
"""The same of all that the drafter keeps for a sequence."""

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
TREE_MASK = "tree_mask"
PAST_LEN = "past_len"
LIVE = "live"
OUTPUT_ROWS = "output_rows"
LOGITS = "logits"

FEATURE_ROWS = "features"
TOKENS = "tokens"
PENDING = "pending"
CHAIN_LOGITS = "chain_logits"
FIRST_STEP = "first_step"
TREE_TOKENS = "tree.tokens"
TREE_PARENTS = "tree.parents"
TREE_LOG_PROBS = "tree.log_probs"
TREE_COUNT = "tree.count"
HOST_TOKENS = "host.tokens"
HOST_PARENTS = "host.parents"
ON_DEVICE = "on_device"
PARENTS = "parents"
NODES = "nodes"
PATH = "path"
KEPT = "kept"
VERDICT = "verdict"
WAITING = "waiting"
WAITING_ROWS = "waiting_rows"
SOURCE_SLOT = "source_slot"
TARGET_SLOT = "target_slot"
TOKEN_INFO = "token_info."
"""What the names of the tensors that hold token information begin with."""

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Files of a checkpoint and of a bundle alike."""

TREE_ATTENTION_DOMAIN = "redraft"
TREE_ATTENTION = "TreeAttention"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph. `in_place_of` names the input whose buffer an output must share."""

    name: str
    dtype: Dtype
    shape: tuple[Dim, ...]
    in_place_of: str | None = None


@dataclass(frozen=True)
class WeightRef:
    """Where an initializer's bytes lie: `length` bytes at `offset` of `file`, a path relative to the graph's folder.

    `source` names the checkpoint's tensors it was made from.
    """

    initializer: str
    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    source: tuple[str, ...]


def key_cache(layer: int) -> str:
    """Name of the key buffer of `layer`, shape [B, H_kv, C, D]."""
    return f"kv.{layer}.key"


def value_cache(layer: int) -> str:
    """Name of the value buffer of `layer`, shape [B, H_kv, C, D]."""
    return f"kv.{layer}.value"


def present(cache: str) -> str:
    """Name of the graph output that updates the KV buffer `cache` in place."""
    return f"{cache}.present"


LAST_TAP = "last"
"""The feature after the final norm, with which Lyanna's drafts begin."""


def features(tap: str) -> str:
    """Name of the feature output of `tap`, shape [B, T, n]: LAST_TAP, or `3` after layer 3."""
    return f"features.{tap}"


@dataclass(frozen=True)
class VerifierShape:
    """What a verifier's buffers need to know of the model. `dtype` is theirs and that of its features."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_positions: int
    dtype: Dtype = "float32"


def verifier_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the verifier's graph, in order.

    `tree_mask[b, i, j]` is true where node j is i or an ancestor of i (padding rows see only themselves); `past_len` is
    the number of rows already live; `live` is the largest past_len + T; `output_rows` picks the rows whose logits are
    wanted, in 0..T-1.
    """
    return (
        TensorSpec(TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(POSITIONS, "int64", ("B", "T")),
        TensorSpec(TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(PAST_LEN, "int64", ("B",)),
        TensorSpec(LIVE, "int64", (1,)),
        TensorSpec(OUTPUT_ROWS, "int64", ("B", "R")),
        *(TensorSpec(cache, shape.dtype, ("B", shape.kv_heads, "C", shape.head_dim)) for cache in caches(shape)),
    )


def verifier_outputs(shape: VerifierShape, taps: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the verifier's graph, in order: logits, features by tap, then the KV buffers, updated in place."""
    return (
        TensorSpec(LOGITS, "float32", ("B", "R", shape.vocabulary)),
        *(TensorSpec(features(tap), shape.dtype, ("B", "T", shape.hidden)) for tap in taps),
        *(
            TensorSpec(present(cache), shape.dtype, ("B", shape.kv_heads, "C", shape.head_dim), in_place_of=cache)
            for cache in caches(shape)
        ),
    )


@dataclass(frozen=True)
class LyannaShape:
    """What the graphs of a Lyanna drafter take and give, and what its buffers need.

    steps: N.   width: k, children of a node and nodes that go on at each level.   nodes: K, root included.
    hot:   H, tokens that have token information, the most frequent ones; the vocabulary where all have.
    rank:  d, of the low-rank form.   dtype: of features and KV, the verifier's.
    """

    hidden: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    steps: int
    width: int
    nodes: int
    token_info: TokenInfo
    hot: int
    rank: int
    dtype: Dtype = "float32"


def token_info_tables(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """The inputs that hold token information, bound once from a file.

    `table[i, j]` is what hot token i adds to the logit of hot token j, times `scales[i]` where its type is short (fp8
    is held as bytes of float8 E4M3, which ONNX's Gather does not know). Where not every token is hot, row H of the
    table is zero, and so is its column H; `index[t]` is token t's row, H where cold. The low-rank form has the
    normalization in its factors: row i of `left` times column j of `right` is `table[i, j]`.
    """
    rows = shape.hot if shape.hot == shape.vocabulary else shape.hot + 1
    specs: tuple[TensorSpec, ...]
    if shape.token_info == "lowrank":
        specs = (
            TensorSpec(f"{TOKEN_INFO}left", "float32", (rows, shape.rank)),
            TensorSpec(f"{TOKEN_INFO}right", "float32", (shape.rank, rows)),
        )
    elif shape.token_info == "fp16":
        specs = (TensorSpec(f"{TOKEN_INFO}table", "float16", (rows, rows)),)
    else:
        dtype: Dtype = "int8" if shape.token_info == "int8" else "uint8"
        specs = (
            TensorSpec(f"{TOKEN_INFO}table", dtype, (rows, rows)),
            TensorSpec(f"{TOKEN_INFO}scales", "float32", (rows, 1)),
        )
    pruned = () if shape.hot == shape.vocabulary else (TensorSpec(f"{TOKEN_INFO}index", "int64", (shape.vocabulary,)),)
    return (*specs, *pruned)


def lyanna_draft_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Inputs of the draft graph, in order.

    Row m of a sequence is a feature at `positions[b, m]` and the token after it; rows from `pending[b]` on are padding.
    The drafter's KV holds `past_len[b]` rows before them, row r of position r; `live` is the largest past_len + M.
    """
    cache = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        TensorSpec(FEATURE_ROWS, shape.dtype, ("B", "M", shape.hidden)),
        TensorSpec(TOKENS, "int64", ("B", "M")),
        TensorSpec(POSITIONS, "int64", ("B", "M")),
        TensorSpec(PENDING, "int64", ("B",)),
        TensorSpec(PAST_LEN, "int64", ("B",)),
        TensorSpec(LIVE, "int64", (1,)),
        TensorSpec(key_cache(0), shape.dtype, cache),
        TensorSpec(value_cache(0), shape.dtype, cache),
        *token_info_tables(shape),
    )


def lyanna_draft_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Outputs of the draft graph, in order. Nodes come likeliest first, the root before all, parents before children.

    `chain_logits[b, i]` are the logits of step i + 1 before token information, times the drafter's sharpness, kept for
    resampling.
    """
    cache = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        *_tree_outputs(shape.nodes),
        TensorSpec(CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(present(key_cache(0)), shape.dtype, cache, in_place_of=key_cache(0)),
        TensorSpec(present(value_cache(0)), shape.dtype, cache, in_place_of=value_cache(0)),
    )


def lyanna_resample_inputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Inputs of the resample graph: `tokens[b]` was verified last, `first_step[b]` counts the steps used up, from 1."""
    return (
        TensorSpec(CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(FIRST_STEP, "int64", ("B",)),
        TensorSpec(TOKENS, "int64", ("B",)),
        *token_info_tables(shape),
    )


def lyanna_resample_outputs(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """Outputs of the resample graph, in order; `tree.count[b]` nodes are real, fewer the later the first step."""
    return (*_tree_outputs(resample_nodes(shape)), TensorSpec(TREE_COUNT, "int64", ("B",)))


def step_layout_inputs() -> tuple[TensorSpec, ...]:
    """Inputs of the layout graph: of each sequence a tree of T nodes from the host and one of K nodes from a drafter,
    of which the first T are taken where `on_device` is not 0.

    Parents come before their children, -1 is the root's; `past_len` rows are live already.
    """
    return (
        TensorSpec(HOST_TOKENS, "int64", ("B", "T")),
        TensorSpec(HOST_PARENTS, "int64", ("B", "T")),
        TensorSpec(TREE_TOKENS, "int64", ("B", "K")),
        TensorSpec(TREE_PARENTS, "int64", ("B", "K")),
        TensorSpec(ON_DEVICE, "int64", ("B",)),
        TensorSpec(PAST_LEN, "int64", ("B",)),
    )


def step_layout_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of the layout graph: T nodes, those past the tree's hanging from its root, and what describes them."""
    return (
        TensorSpec(TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(PARENTS, "int64", ("B", "T")),
        TensorSpec(POSITIONS, "int64", ("B", "T")),
        TensorSpec(TREE_MASK, "bool", ("B", "T", "T")),
    )


def step_accept_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the accepting graph: logits of every node, the tree, and how many of its nodes are real."""
    return (
        TensorSpec(LOGITS, "float32", ("B", "T", shape.vocabulary)),
        TensorSpec(TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(PARENTS, "int64", ("B", "T")),
        TensorSpec(TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(NODES, "int64", ("B",)),
    )


def step_accept_outputs() -> tuple[TensorSpec, ...]:
    """Outputs of the accepting graph.

    `path[b]` are the root and the accepted nodes, `kept[b]` of them, then its own place: 0, 2, 5, 3, 4 … with `kept` 3.
    `verdict[b]` is what the host reads: `kept`, the path, and the verifier's token after every node.
    """
    return (
        TensorSpec(PATH, "int64", ("B", "T")),
        TensorSpec(KEPT, "int64", ("B",)),
        TensorSpec(VERDICT, "int64", ("B", "1 + 2 T")),
    )


def step_keep_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the keeping graph: the accepting graph's path, the rows live before the tree, all KV buffers."""
    return (
        TensorSpec(PATH, "int64", ("B", "T")),
        TensorSpec(PAST_LEN, "int64", ("B",)),
        *verifier_state(shape),
    )


def step_keep_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Outputs of the keeping graph: row past_len + path[i] of each buffer now at past_len + i as well, in place."""
    return move_outputs(verifier_state(shape))


def step_collect_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the collecting graph: a call's feature rows, its path, and what waits already, W rows of which some."""
    return (
        TensorSpec(FEATURE_ROWS, shape.dtype, ("B", "F", shape.hidden)),
        TensorSpec(PATH, "int64", ("B", "T")),
        TensorSpec(WAITING, shape.dtype, ("B", "W", shape.hidden)),
        TensorSpec(WAITING_ROWS, "int64", ("B",)),
    )


def step_collect_outputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Output of the collecting graph: feature row path[i] at row waiting_rows + i, in place; W holds T rows more."""
    return (TensorSpec(present(WAITING), shape.dtype, ("B", "W", shape.hidden), in_place_of=WAITING),)


Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs of a graph."""


def step_signatures(shape: VerifierShape, lyanna: LyannaShape | None) -> dict[str, Signature]:
    """The signatures of the graphs of a step by name."""
    found = {
        STEP_LAYOUT: (step_layout_inputs(), step_layout_outputs()),
        STEP_ACCEPT: (step_accept_inputs(shape), step_accept_outputs()),
        STEP_KEEP: (step_keep_inputs(shape), step_keep_outputs(shape)),
        STEP_MOVE: (move_inputs(verifier_state(shape)), move_outputs(verifier_state(shape))),
    }
    if lyanna:
        found[STEP_COLLECT] = (step_collect_inputs(shape), step_collect_outputs(shape))
        found[LYANNA_MOVE] = (move_inputs(lyanna_state(lyanna)), move_outputs(lyanna_state(lyanna)))
    return found


def move_inputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a moving graph: from which slot to which, and what is kept by slot, in axis 0."""
    slots = (TensorSpec(SOURCE_SLOT, "int64", (1,)), TensorSpec(TARGET_SLOT, "int64", (1,)))
    return (*slots, *tensors)


def move_outputs(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of a moving graph: the same tensors, in place."""
    return tuple(replace(spec, name=present(spec.name), in_place_of=spec.name) for spec in tensors)


def verifier_state(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """What a verifier keeps by slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return tuple(TensorSpec(cache, shape.dtype, dims) for cache in caches(shape))


def lyanna_state(shape: LyannaShape) -> tuple[TensorSpec, ...]:
    """What a Lyanna drafter keeps by slot."""
    dims = ("B", shape.kv_heads, "C", shape.head_dim)
    return (
        TensorSpec(key_cache(0), shape.dtype, dims),
        TensorSpec(value_cache(0), shape.dtype, dims),
        TensorSpec(CHAIN_LOGITS, "float32", ("B", shape.steps, shape.vocabulary)),
        TensorSpec(WAITING, shape.dtype, ("B", "W", shape.hidden)),
    )


def caches(shape: VerifierShape) -> list[str]:
    """Names of the KV buffers of all layers: key, value, key, …"""
    return [name(layer) for layer in range(shape.layers) for name in (key_cache, value_cache)]


CATCH_UP_ROWS = 64
"""Rows that a drafter catches up on with one call, at most; its buffers and tables have as many beyond the context."""
DRAFT_WIDTHS = (16, CATCH_UP_ROWS)
"""Rows that a device's draft call has room for: few in a step, many after a prompt."""
TREE_WIDTHS = (1, 2, 4, 8, 13, 16, 32, 64)
"""Nodes, root included, that a device verifies at once: other trees are padded to the next."""
_WIDE_STEP = 32
MOST_DEPTH = 64
"""Deepest node that the layout graph can place."""
MOST_WAITING_ROWS = 512
"""Feature rows of a sequence that a device has room for: those that a drafter catches up on, and one call's."""


def padded_width(nodes: int) -> int:
    """Nodes that a tree is padded to: the next of TREE_WIDTHS, beyond which there is one for every 32."""
    return next((width for width in TREE_WIDTHS if nodes <= width), -(-nodes // _WIDE_STEP) * _WIDE_STEP)


def tree_size(steps: int, width: int) -> int:
    """Nodes of a whole tree of Algorithm 1, root included."""
    return 1 + width + (steps - 1) * width * width if steps else 1


def resample_nodes(shape: LyannaShape) -> int:
    """Nodes that a resampled tree is cut to: one step fewer than a fresh one at least."""
    return min(shape.nodes, tree_size(shape.steps - 1, shape.width))


def _tree_outputs(nodes: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(TREE_TOKENS, "int64", ("B", nodes)),
        TensorSpec(TREE_PARENTS, "int64", ("B", nodes)),
        TensorSpec(TREE_LOG_PROBS, "float32", ("B", nodes)),
    )
