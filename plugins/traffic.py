"""Bytes that the kernels must move: a lower bound to compare measured times with."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class AttentionSizes:
    """One call over sequences of equal lengths: `kv_len` committed rows each, then `nodes` new ones."""

    dtype: str
    batch: int
    kv_len: int
    nodes: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of one head."""
        return self.head_dim * ELEMENT_BYTES[self.dtype]


def attention_bytes(sizes: AttentionSizes) -> int:
    """Return the fewest bytes of one call: K, V and mask once, new rows read and written, q read, out written."""
    cached = 2 * sizes.batch * sizes.kv_heads * (sizes.kv_len + sizes.nodes) * sizes.row_bytes
    new_rows = 2 * 2 * sizes.batch * sizes.nodes * sizes.kv_heads * sizes.row_bytes
    queries = 2 * sizes.batch * sizes.nodes * sizes.q_heads * sizes.row_bytes
    return cached + new_rows + queries + sizes.batch * sizes.nodes * -(-sizes.nodes // 32) * 4


def attention_flops(sizes: AttentionSizes) -> int:
    """Return the multiplications and additions of both products, hidden scores included."""
    return 4 * sizes.batch * sizes.q_heads * sizes.nodes * (sizes.kv_len + sizes.nodes) * sizes.head_dim


def compaction_bytes(caches: int, batch: int, kv_heads: int, row_bytes: int, moved_rows: int) -> int:
    """Return the bytes of moved rows of all caches, read and written."""
    return 2 * caches * batch * kv_heads * moved_rows * row_bytes
