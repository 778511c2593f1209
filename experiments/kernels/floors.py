"""The least time of each kernel call on cards that we name, from bytes and operations alone.

    python -m experiments.kernels.floors

A call must move its bytes once and compute its products. Loads and products overlap at best, so its floor is the longer
of the two. Cards are as their data sheets say, without sparsity. `mma` is the share of the
tensor cores' peak that mma.sync reaches: 0.63 on Hopper (Luo et al. 2024, arXiv:2402.13499), the rest needs wgmma,
and all of it before. `bytes_under_way` is what each processor must have on its way to hide the memory's latency
(Little's law; latencies are rounded). Prints one JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from redraft.bench.command import run

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


def attention_bytes(sizes: AttentionSizes) -> int:
    """Return the fewest bytes of one call: K, V and mask once, new rows read and written, q read, out written."""
    row_bytes = sizes.head_dim * ELEMENT_BYTES[sizes.dtype]
    cached = 2 * sizes.batch * sizes.kv_heads * (sizes.kv_len + sizes.nodes) * row_bytes
    new_rows = 2 * 2 * sizes.batch * sizes.nodes * sizes.kv_heads * row_bytes
    queries = 2 * sizes.batch * sizes.nodes * sizes.q_heads * row_bytes
    return cached + new_rows + queries + sizes.batch * sizes.nodes * -(-sizes.nodes // 32) * 4


def attention_flops(sizes: AttentionSizes) -> int:
    """Return the multiplications and additions of both products, hidden scores included."""
    return 4 * sizes.batch * sizes.q_heads * sizes.nodes * (sizes.kv_len + sizes.nodes) * sizes.head_dim


def compaction_bytes(caches: int, batch: int, kv_heads: int, row_bytes: int, moved_rows: int) -> int:
    """Return the bytes of moved rows of all caches, read and written."""
    return 2 * caches * batch * kv_heads * moved_rows * row_bytes


@dataclass(frozen=True)
class Card:
    """Peaks of one card: bytes and operations in 16 bits (sums in 32) a second, and a load's latency in seconds."""

    bandwidth: float
    flops: float
    processors: int
    latency: float
    mma: float = 1.0


CARDS = {
    "H200": Card(4.8e12, 989e12, 132, 800e-9, 0.63),
    "H100 SXM": Card(3.35e12, 989e12, 132, 800e-9, 0.63),
    "A100 80 GB SXM": Card(2.04e12, 312e12, 108, 600e-9),
    "RTX 4090": Card(1.008e12, 165e12, 128, 600e-9),
}
HEADS = ((32, 32), (32, 8))
LENGTHS = (1024, 16384)
NODES = (1, 16, 64)
LAYERS, PATH = 32, 4


def main() -> dict[str, Any]:
    """Return the floors of every card."""
    return {name: described(card) for name, card in CARDS.items()}


def described(card: Card) -> dict[str, Any]:
    """Return a card's floors in µs. `most_of_copy` is the largest share of the memory's speed that a call can reach."""
    sizes = [
        AttentionSizes("float16", 1, kv_len, nodes, *heads, 128)
        for heads, kv_len, nodes in product(HEADS, LENGTHS, NODES)
    ]
    moved = compaction_bytes(2 * LAYERS, 1, 32, 256, PATH)
    return {
        "bytes_under_way": round(card.bandwidth * card.latency / card.processors),
        "attention": [{**vars(one), **floor(card, attention_bytes(one), attention_flops(one))} for one in sizes],
        "compaction": {"layers": LAYERS, "kv_heads": 32, "path": PATH, **floor(card, moved, 0)},
    }


def floor(card: Card, moved: int, flops: int) -> dict[str, float]:
    """Return a call's floor, from the bytes it must move and its operations."""
    memory, products = moved / card.bandwidth, flops / (card.flops * card.mma)
    least = max(memory, products)
    return {"memory_us": 1e6 * memory, "products_us": 1e6 * products, "us": 1e6 * least, "most_of_copy": memory / least}


if __name__ == "__main__":
    run(main)
