"""The attention kernels against float64, where the checks of all kernels (`test_checks.py`) do not reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from redraft.export.graph.tree_attention import tree_attention
from redraft.plugins.library import HEAD_DIMS, Kernels

from .cases import Case, attend, attention_args, error_of, random_case, reference, same_bits
from .devices import DeviceMemory, capture, current_stream


def assert_right(kernels: Kernels, case: Case, **how: int | bool) -> NDArray:
    """Attend, and return the output if it and the caches are right."""
    out, keys, values = attend(kernels, case, **how)
    _, expected_keys, expected_values = reference(case)
    assert error_of(case, out, truncated=not kernels.on_cpu or bool(how.get("truncate"))) < 1
    assert same_bits(keys, expected_keys)
    assert same_bits(values, expected_values)
    return out


@pytest.mark.parametrize(
    ("head_dim", "cache_len", "nodes", "heads", "options"),
    [
        *((head_dim, [0, 131], 13, (4, 2), {}) for head_dim in HEAD_DIMS),
        (64, [300, 33], 23, (6, 2), {}),
        (128, [1100], 4, (2, 1), {"scale": 128**-0.5}),
        (64, [90], 8, (2, 1), {"softcap": 2.0, "scale": 0.5}),
    ],
)
def test_float32_with_sums_cut_off_as_tensor_cores_do(
    kernels: Kernels, head_dim: int, cache_len: list[int], nodes: int, heads: tuple[int, int], options: dict[str, float]
) -> None:
    case = random_case(13, "float32", head_dim, cache_len, nodes, heads, **options)
    assert not same_bits(attend(kernels, case)[0], assert_right(kernels, case, truncate=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_causal_chunks(any_kernels: Kernels, dtype: str) -> None:
    assert_right(any_kernels, random_case(3, dtype, 64, [0, 90, 7], 100, (2, 1), causal=True))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_trees(any_kernels: Kernels, dtype: str) -> None:
    assert_right(any_kernels, random_case(5, dtype, 128, [33 if any_kernels.on_cpu else 1131], 256, (1, 1)))


@pytest.mark.parametrize(
    ("dtype", "ctas"),
    [*(("float16", ctas) for ctas in (1, 2, 7, 64, 300)), ("bfloat16", 7), ("float32", 7)],
)
def test_a_long_prefix_shared_among_any_number_of_blocks(any_kernels: Kernels, dtype: str, ctas: int) -> None:
    assert_right(any_kernels, random_case(6, dtype, 64, [3000, 12, 700], 4, (2, 1)), ctas=ctas)


def test_blocks_share_units_of_several_row_blocks(kernels: Kernels) -> None:
    case = random_case(7, "float16", 64, [250, 90], 40, (8, 2))
    for ctas in (3, 11):
        assert_right(kernels, case, ctas=ctas)


@pytest.mark.parametrize(("dtype", "orders"), [("float16", (1, 2, 3)), ("float32", (1, 4, 5))])
def test_threads_may_take_turns_in_any_order(kernels: Kernels, dtype: str, orders: tuple[int, ...]) -> None:
    """Copies arrive at once in odd orders, late in even ones."""
    case = random_case(8, dtype, 80, [150, 3], 20, (4, 2))
    expected = attend(kernels, case, ctas=4)
    for order in orders:
        assert all(map(same_bits, expected, attend(kernels, case, ctas=4, order=order)))


@pytest.mark.parametrize("window", [1, 5, 64, 70, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(any_kernels: Kernels, window: int, causal: bool) -> None:
    assert_right(any_kernels, random_case(10, "float16", 64, [200, 3, 64], 20, (2, 1), causal=causal, window=window))


@pytest.mark.parametrize(("dtype", "place"), [("float16", 0), ("float16", 75), ("float16", 149), ("float32", 75)])
def test_one_key_above_all_others(any_kernels: Kernels, dtype: str, place: int) -> None:
    """Scores a thousand apart: nothing overflows, and earlier terms are scaled away, early or late."""
    case = random_case(12, dtype, 64, [150], 6, scale=1.0)
    case.key_cache[0, :, place] = 30 * np.sign(case.q[0, 0, 0].astype(np.float32))
    assert_right(any_kernels, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_large_scores_of_both_signs(any_kernels: Kernels, dtype: str) -> None:
    assert_right(any_kernels, random_case(13, dtype, 64, [130], 6, magnitude=50.0, scale=1.0))


def test_a_node_that_sees_nothing_gives_zero(kernels: Kernels) -> None:
    """A node may not see even itself: no tree is like that, but a mask can be."""
    case = random_case(20, "float16", 64, [0], 3)
    assert case.mask is not None
    case.mask[0, 1] = False
    out, _, _ = attend(kernels, case)
    assert not out[0, 1].any()
    assert np.isfinite(out).all()


def test_a_mask_of_bytes_is_the_same_as_a_mask_of_bits(any_kernels: Kernels) -> None:
    case = random_case(15, "float16", 64, [20, 50], 45)
    assert all(map(same_bits, attend(any_kernels, case), attend(any_kernels, case, bits=False)))


@pytest.mark.parametrize("bits", [False, True])
def test_rows_that_are_in_the_cache_already(any_kernels: Kernels, bits: bool) -> None:
    case = random_case(16, "float16", 64, [20, 50], 9)
    written = attend(any_kernels, case)
    filled = replace(case, key_cache=written[1], value_cache=written[2], k=case.k * 0, v=case.v * 0)
    assert all(map(same_bits, written, attend(any_kernels, filled, bits=bits, write=False)))


@pytest.mark.parametrize("wrong", [-1, -(2**40), 10**6, 2**40, 98])
def test_a_length_outside_the_cache_harms_nothing(any_kernels: Kernels, wrong: int) -> None:
    """Other sequences are right, rows that do not fit are dropped, and nothing is written past an array's end."""
    case = random_case(17, "float16", 64, [60, 90, 31], 6)
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache)] = 0
    capacity = case.key_cache.shape[2]
    out, keys, values = attend(any_kernels, replace(case, cache_len=np.array([60, wrong, 31])))
    nearest = min(max(wrong, 0), capacity)
    counts = np.array([6, min(6, capacity - nearest), 6])
    right = replace(case, counts=counts, cache_len=np.array([60, nearest, 31]))
    expected, expected_keys, expected_values = reference(right)
    assert np.isfinite(out).all()
    assert same_bits(keys, expected_keys)
    assert same_bits(values, expected_values)
    for sequence in (0, 2):
        np.testing.assert_allclose(out[sequence], expected[sequence], atol=5e-3)


def test_the_exported_operator_means_the_same(kernels: Kernels) -> None:
    case = random_case(18, "float32", 64, [40, 9], 7, (4, 2), spare=0, window=12)
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache)] = 0  # the operator's torch meaning reads hidden rows
    flat = [torch.from_numpy(array.reshape(2, 7, -1)) for array in (case.q, case.k, case.v)]
    rest = (case.key_cache, case.value_cache, case.mask, case.positions, case.cache_len, np.array([47]))
    expected = tree_attention(*flat, *map(torch.from_numpy, rest), None, case.scale, 0.0, case.window, 0, 4, 2)
    for found, tensor in zip(attend(kernels, case), expected, strict=True):
        np.testing.assert_allclose(found.reshape(tensor.shape), tensor.numpy(), atol=2e-6)


@pytest.mark.gpu
def test_one_graph_serves_lengths_that_change(device_kernels: Kernels) -> None:
    case, memory = random_case(21, "float16", 128, [900, 900], 5, (4, 2)), DeviceMemory()
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache)] = 1
    args = attention_args(case, memory)
    scratch = np.full(device_kernels.workspace_bytes(args), 255, dtype=np.uint8)
    address = memory.put(scratch)
    graph = capture([lambda: device_kernels.attend(args, address, scratch.nbytes, current_stream())])
    for kv_len in (900, 17, 0):
        lengths = np.array([kv_len, kv_len])
        memory.held[args.cache_len].copy_(memory.torch.from_numpy(lengths.view(np.uint8)))
        graph.replay()
        captured = memory.get(args.out, case.q)
        memory.held[args.out].zero_()
        device_kernels.attend(args, address, scratch.nbytes)
        assert same_bits(captured, memory.get(args.out, case.q))
