"""Floors of kernel calls, from bytes and operations."""

from __future__ import annotations

import pytest

from experiments.kernels.floors import CARDS, described, floor


def test_the_longer_of_loads_and_products_counts() -> None:
    card = CARDS["H100 SXM"]
    loads = floor(card, 3_350_000_000, 1)
    assert (loads["us"], loads["most_of_copy"]) == (pytest.approx(1000), 1.0)
    products = floor(card, 3_350_000_000, 1_246_140_000_000)
    assert products["us"] == pytest.approx(2000)  # mma.sync reaches 0.63 of 989 TFLOP/s
    assert products["most_of_copy"] == pytest.approx(0.5)


def test_only_many_rows_over_few_heads_are_bound_by_products() -> None:
    """4 x 64 rows share a key head of 32/8 heads: 256 operations a byte in 16 bits."""
    for card in CARDS.values():
        bound = [one for one in described(card)["attention"] if one["most_of_copy"] < 1]
        assert {(one["kv_heads"], one["nodes"]) for one in bound} == {(8, 64)}
