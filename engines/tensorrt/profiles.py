"""Optimization profiles of every graph: prefill chunks, one token, trees. TensorRT tunes an engine for each of them.

With the customary two profiles, decoding without speculation would run kernels tuned for trees. A profile is tuned for
the usual width and takes the largest. A graph has the profiles of calls that happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redraft import names
from redraft.engines.tensorrt_records import Profile, Range
from redraft.errors import UsageError
from redraft.methods.base import PREFILL, TOKEN, TREE, GraphSpec, Sizes
from redraft.names import TensorSpec

_SMALLEST_CACHE = 2
SymbolSizes = Mapping[str, Mapping[str, Sizes]]
"""The smallest, tuned and largest size of each symbol, by profile."""


@dataclass(frozen=True)
class CallLimits:
    """The largest calls that the engines must take.

    batch:     B, sequences.   tree: T, nodes of a tree, root included.   prefill: T, prompt tokens of a chunk.
    capacity:  C, rows of a sequence's KV buffer.
    usual:     T of most trees, the size that engines are tuned for.
    """

    batch: int
    tree: int
    prefill: int
    max_model_len: int
    usual: int = 13  # twelve nodes and the root

    @property
    def widest(self) -> int:
        """Return the nodes that the largest tree is padded to, at most the rows of the KV buffers."""
        return min(names.padded_width(self.tree), self.max_model_len)

    @property
    def tuned(self) -> int:
        """Return the nodes that the usual tree is padded to."""
        return min(names.padded_width(self.usual), self.widest)

    @property
    def chunk(self) -> int:
        """Return the tokens of the largest chunk of a prompt, at most `max_model_len`."""
        return min(self.prefill, self.max_model_len)

    def __post_init__(self) -> None:
        if min(self.batch, self.prefill, self.tree - 1, self.max_model_len - 1) < 1:
            raise UsageError(f"expected sizes of at least one sequence, one token and a tree of two nodes, not {self}")
        if self.tree > self.max_model_len:
            raise UsageError(
                f"a tree of {self.tree} tokens does not fit in the context of {self.max_model_len}",
                f"raise --max-model-len, or lower --tree-nodes to {self.max_model_len}",
            )


def profiles_of(
    symbols: SymbolSizes, inputs: Sequence[TensorSpec], limits: CallLimits, kv_len_is_shape: bool
) -> tuple[Profile, ...]:
    """Return the profiles of a graph of a bundle, in the engine's order, without duplicates.

    symbols:         sizes by profile, as `verifier_symbols` and `drafter_symbols` return them.
    kv_len_is_shape: the values of `kv_len` are sizes inside the graph, as without the plugin, and get their own ranges.
                     KV buffers then have the most rows alone (`fixed_capacity`).
    """
    found: list[Profile] = []
    fixed = fixed_capacity(symbols) if kv_len_is_shape else None
    for name, each in symbols.items():
        sizes = {**each, "C": (fixed, fixed, fixed)} if fixed else each
        ranges = {spec.name: _range(spec, sizes) for spec in inputs if any(isinstance(dim, str) for dim in spec.shape)}
        if kv_len_is_shape and names.KV_LEN in {spec.name for spec in inputs}:
            rows = sizes["T"] if "T" in sizes else sizes["M"]
            ranges[names.KV_LEN] = Range((rows[0],), (max(limits.max_model_len // 2, rows[1]),), (sizes["C"][2],))
        if all(ranges != profile.inputs for profile in found):
            found.append(Profile(name, ranges))
    return tuple(found)


def fixed_capacity(symbols: SymbolSizes) -> int | None:
    """Return the rows of a graph's KV buffers where TensorRT wants them fixed, None for a graph without any."""
    return max((sizes["C"][2] for sizes in symbols.values() if "C" in sizes), default=None)


def verifier_symbols(graph: str, limits: CallLimits) -> SymbolSizes:
    """Return sizes of the symbols by profile for a graph of the verifier or of a step.

    T nodes of a call, K of a drafter's tree, S of a stored tree. Engines are tuned for one sequence, which has the
    least work to hide latency.
    """
    tuned, widest, one = limits.tuned, limits.widest, (1, 1, 1)
    batch: dict[str, Sizes] = {"B": (1, 1, limits.batch)}
    buffers = {**batch, "C": (_SMALLEST_CACHE, limits.max_model_len, names.kv_rows(limits.max_model_len))}
    trees = {**batch, "T": (2, tuned, widest), "K": (1, tuned, widest), "S": (1, tuned, widest)}
    if graph == names.VERIFIER:  # a prompt is computed alone; a tree has at least a root and a node
        return {
            PREFILL: {**buffers, "B": one, "T": (1, limits.chunk, limits.chunk), "R": one},
            TOKEN: {**buffers, "T": one, "R": one},
            TREE: {**buffers, "T": trees["T"], "R": trees["T"]},
        }
    if graph == names.STEP_COMPACT_KV:  # for trees only: a single root is already in its place
        return {TREE: {**buffers, **trees}}
    if graph == names.STEP_GATHER_FEATURES:  # rows of trees and prompts wait for a draft: few calls share sizes
        most = names.MAX_PENDING_FEATURES
        return {TREE: {**batch, "F": (1, tuned, most), "T": (1, tuned, most), "W": (1, most, most)}}
    if graph == names.STEP_STORE_TREES:  # after every draft for several sequences
        return {TREE: trees}
    return {TOKEN: {**trees, "T": one}, TREE: trees}  # before and after a verification


def drafter_symbols(graph: GraphSpec[Any], spare_rows: int, limits: CallLimits) -> SymbolSizes:
    """Return sizes of the symbols by profile for a drafter's graph. spare_rows: rows of its KV after `max_model_len`.

    KV buffers hold the rows of a call, also at the smallest and at the tuned size: TensorRT checks both.
    """
    most = names.kv_rows(limits.max_model_len + spare_rows)
    found = {}
    for name, own in graph.profiles.items():
        rows = next((own[symbol][2] for symbol in ("M", "T") if symbol in own), _SMALLEST_CACHE)
        capacity = (max(_SMALLEST_CACHE, rows), max(limits.max_model_len, rows), most)
        found[name] = {"B": (1, 1, limits.batch), "C": capacity, **own}
    return found


def _range(spec: TensorSpec, sizes: Mapping[str, Sizes]) -> Range:
    least, tuned, most = (
        tuple(dim if isinstance(dim, int) else sizes[dim][which] for dim in spec.shape) for which in range(3)
    )
    return Range(least, tuned, most)
