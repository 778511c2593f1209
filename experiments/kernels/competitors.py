"""Other libraries' attention over the timed problems of the kernels, each in its fastest form.

None writes the new rows: they are in the cache already. Masks, biases and folded queries are made once, outside the
calls. Every call returns its answer in its own layout, with a function that brings it to [B, T, Hq, D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.kernels.problem import Call, DeviceProblem

BIAS_COLUMNS = 16
"""PyTorch's memory-efficient attention wants rows of a bias at multiples of this; else it copies the bias each call."""
FLASHINFER_WORKSPACE = 128 << 20


@dataclass(frozen=True)
class Way:
    """One way to solve a problem: `call`, and `answer`, which turns its result into [B, T, Hq, D]."""

    call: Call
    answer: Callable[[Any], Any]


Build = Callable[[DeviceProblem], Way]


def competitors(batch: int, nodes: int, grouped: bool) -> Mapping[str, Build]:
    """Return the ways that fit a problem, by name. Building one may raise its library's errors or ImportError."""
    sdpa: dict[str, Build] = {"sdpa_bool": sdpa_bool, "sdpa_bias": sdpa_bias}
    if grouped:
        sdpa["sdpa_folded"] = sdpa_folded
    if nodes == 1:
        sdpa["sdpa_unmasked"] = sdpa_unmasked
    if batch == 1 and nodes == 1:
        return {**sdpa, "flashinfer_decode": flashinfer_decode, "flashinfer_decode_mma": flashinfer_decode_mma}
    if batch == 1:
        return {**sdpa, "flashinfer_prefill": flashinfer_prefill}
    return {**sdpa, "flashinfer_paged": flashinfer_paged}


def sdpa_bool(problem: DeviceProblem) -> Way:
    """Return PyTorch's attention with a mask of bools."""
    seen = problem.torch.from_numpy(problem.visible()).to(problem.device)[:, None]
    return _sdpa(problem, problem.q.transpose(1, 2), seen)


def sdpa_bias(problem: DeviceProblem) -> Way:
    """Return the same with a bias in the queries' type, rows aligned."""
    return _sdpa(problem, problem.q.transpose(1, 2), _bias(problem, 1))


def sdpa_unmasked(problem: DeviceProblem) -> Way:
    """Return the same without a mask, for a node that sees every row."""
    return _sdpa(problem, problem.q.transpose(1, 2), None)


def sdpa_folded(problem: DeviceProblem) -> Way:
    """Join queries of heads that share a key head into one, so that each key is read once for all of them."""
    s = problem.sizes
    group = s.q_heads // s.kv_heads
    split = problem.q.view(s.batch, s.nodes, s.kv_heads, group, s.head_dim).permute(0, 2, 3, 1, 4)
    queries = split.reshape(s.batch, s.kv_heads, group * s.nodes, s.head_dim)
    bias = None if s.nodes == 1 else _bias(problem, group)

    def answer(out: Any) -> Any:
        unfolded = out.view(s.batch, s.kv_heads, group, s.nodes, s.head_dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(problem.q.shape)

    return Way(_sdpa(problem, queries, bias).call, answer)


def flashinfer_decode(problem: DeviceProblem, tensor_cores: bool = False) -> Way:
    """Return FlashInfer's attention of one node of one sequence."""
    module = importlib.import_module("flashinfer")
    keys, values = (rows[0] for rows in _kv_len(problem))  # [Hkv, S, D]
    return Way(
        lambda: module.single_decode_with_kv_cache(
            problem.q[0, 0], keys, values, kv_layout="HND", use_tensor_cores=tensor_cores, sm_scale=problem.scale
        ),
        lambda out: out[None, None],
    )


def flashinfer_decode_mma(problem: DeviceProblem) -> Way:
    """Return the same on tensor cores."""
    return flashinfer_decode(problem, tensor_cores=True)


def flashinfer_prefill(problem: DeviceProblem) -> Way:
    """Return FlashInfer's attention of one sequence under a packed mask."""
    module = importlib.import_module("flashinfer")
    keys, values = (rows[0] for rows in _kv_len(problem))
    mask = packed_mask(problem)
    return Way(
        lambda: module.single_prefill_with_kv_cache(
            problem.q[0], keys, values, packed_custom_mask=mask, kv_layout="HND", sm_scale=problem.scale
        ),
        lambda out: out[None],
    )


def flashinfer_paged(problem: DeviceProblem) -> Way:
    """Return FlashInfer's attention of a batch: our caches, a page for each sequence. One node has no mask."""
    module = importlib.import_module("flashinfer")
    torch, s = problem.torch, problem.sizes
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.device)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def counted(step: int) -> Any:
        return torch.arange(s.batch + 1, dtype=torch.int32, device=problem.device) * step

    wrapper.plan(
        counted(s.nodes), counted(1), counted(1)[:-1], torch.full_like(counted(1)[:-1], s.kv_len + s.nodes),
        s.q_heads, s.kv_heads, s.head_dim, problem.capacity,
        sm_scale=problem.scale, q_data_type=problem.q.dtype,
        **({} if s.nodes == 1 else {"custom_mask": torch.from_numpy(problem.visible().reshape(-1)).to(problem.device)}),
    )  # fmt: skip
    queries, caches = problem.q.flatten(0, 1), (problem.keys, problem.values)
    for cache in caches:  # only our kernels promise that NaN in the unused end of a page does no harm
        cache[:, :, s.kv_len + s.nodes :] = 0
    return Way(lambda: wrapper.run(queries, caches), lambda out: out.view(problem.q.shape))


def packed_mask(problem: DeviceProblem) -> Any:
    """Pack the visible rows of one sequence for FlashInfer: all rows in sequence, eight to a byte, lowest first."""
    return problem.torch.from_numpy(np.packbits(problem.visible().reshape(-1), bitorder="little")).to(problem.device)


def _sdpa(problem: DeviceProblem, queries: Any, mask: Any) -> Way:
    keys, values = _kv_len(problem)
    grouped = queries.shape[1] != keys.shape[1]
    functional = problem.torch.nn.functional
    return Way(
        lambda: functional.scaled_dot_product_attention(
            queries, keys, values, mask, scale=problem.scale, enable_gqa=grouped
        ),
        lambda out: out.transpose(1, 2),
    )


def _bias(problem: DeviceProblem, group: int) -> Any:
    """Return 0 for visible rows and minus infinity for others, [B, 1, group T, live + T], with aligned rows."""
    s, torch = problem.sizes, problem.torch
    end = s.kv_len + s.nodes
    columns = -(-end // BIAS_COLUMNS) * BIAS_COLUMNS
    whole = torch.zeros(s.batch, 1, group * s.nodes, columns, dtype=problem.q.dtype, device=problem.device)
    hidden = ~torch.from_numpy(problem.visible()).to(problem.device).repeat(1, group, 1)[:, None]
    return whole[..., :end].masked_fill_(hidden, float("-inf"))


def _kv_len(problem: DeviceProblem) -> tuple[Any, Any]:
    end = problem.sizes.kv_len + problem.sizes.nodes
    return problem.keys[:, :, :end], problem.values[:, :, :end]
