"""Names, element types and symbolic shapes of every tensor that crosses a graph's boundary: their one home.

Symbols: B sequences in the call, T tokens verified at once, R rows whose logits are wanted, C capacity of the KV
buffers in rows, V vocabulary, n hidden size, H_kv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["int64", "int32", "bool", "float32", "float16", "bfloat16"]
Dim = int | str
"""A fixed size, or the name of a symbol that the caller chooses per call."""

VERIFIER = "verifier"
"""The verifier's graph, any batch, standard operators only."""
VERIFIER_SINGLE = "verifier.single"
"""The same graph lowered for one sequence on ONNX Runtime's CPU kernels (absent where they do not fit the model)."""

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
TREE_MASK = "tree_mask"
PAST_LEN = "past_len"
LIVE = "live"
OUTPUT_ROWS = "output_rows"
LOGITS = "logits"

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


def features(tap: str) -> str:
    """Name of the feature output of `tap`, shape [B, T, n]: `last` is after the final norm, `3` after layer 3."""
    return f"features.{tap}"


@dataclass(frozen=True)
class VerifierShape:
    """What a verifier's buffers need to know of the model."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    max_positions: int


def verifier_inputs(shape: VerifierShape) -> tuple[TensorSpec, ...]:
    """Inputs of the verifier's graph, in order.

    `tree_mask[b, i, j]` is true where node j is i or an ancestor of i (padding rows see only themselves); `past_len` is
    the number of rows already live; `live` is the largest past_len + T; `output_rows` picks the rows whose logits are
    wanted, in 0..T-1.
    """
    caches = [name(layer) for layer in range(shape.layers) for name in (key_cache, value_cache)]
    return (
        TensorSpec(TOKEN_IDS, "int64", ("B", "T")),
        TensorSpec(POSITIONS, "int64", ("B", "T")),
        TensorSpec(TREE_MASK, "bool", ("B", "T", "T")),
        TensorSpec(PAST_LEN, "int64", ("B",)),
        TensorSpec(LIVE, "int64", (1,)),
        TensorSpec(OUTPUT_ROWS, "int64", ("B", "R")),
        *(TensorSpec(cache, "float32", ("B", shape.kv_heads, "C", shape.head_dim)) for cache in caches),
    )


def verifier_outputs(shape: VerifierShape, taps: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    """Outputs of the verifier's graph, in order: logits, features by tap, then the KV buffers, updated in place."""
    caches = [name(layer) for layer in range(shape.layers) for name in (key_cache, value_cache)]
    return (
        TensorSpec(LOGITS, "float32", ("B", "R", shape.vocabulary)),
        *(TensorSpec(features(tap), "float32", ("B", "T", shape.hidden)) for tap in taps),
        *(
            TensorSpec(present(cache), "float32", ("B", shape.kv_heads, "C", shape.head_dim), in_place_of=cache)
            for cache in caches
        ),
    )
