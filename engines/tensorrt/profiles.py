"""Optimization profiles of every graph: prefill chunks, one token, trees. TensorRT tunes an engine for each of them.

With the customary two profiles, decoding without speculation would run kernels tuned for trees. A profile is tuned for
the usual width and takes the largest. A graph has the profiles of calls that happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redraft import names
from redraft.engines.tensorrt.records import Profile, Range
from redraft.errors import UsageError
from redraft.methods.base import PREFILL, TOKEN, TREE, GraphSpec, Sizes
from redraft.names import TensorSpec

_SMALLEST_CACHE = 2


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
    symbols: Mapping[str, Mapping[str, Sizes]], inputs: Sequence[TensorSpec], limits: CallLimits, kv_len_is_shape: bool
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


def fixed_capacity(symbols: Mapping[str, Mapping[str, Sizes]]) -> int | None:
    """Return the rows of a graph's KV buffers where TensorRT wants them fixed, None for a graph without any."""
    return max((sizes["C"][2] for sizes in symbols.values() if "C" in sizes), default=None)


def verifier_symbols(graph: str, limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Return sizes of the symbols by profile for a graph of the verifier or of a step."""
    return _SYMBOLS[graph](limits)


def drafter_symbols(graph: GraphSpec[Any], spare_rows: int, limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Return sizes of the symbols by profile for a drafter's graph. spare_rows: rows of its KV after `max_model_len`.

    KV buffers hold the rows of a call, also at the smallest and at the tuned size: TensorRT checks both.
    """
    most = names.kv_rows(limits.max_model_len + spare_rows)
    found = {}
    for name, own in graph.profiles.items():
        rows = next((own[symbol][2] for symbol in ("M", "T") if symbol in own), _SMALLEST_CACHE)
        capacity = (max(_SMALLEST_CACHE, rows), max(limits.max_model_len, rows), most)
        found[name] = {**_batch(limits), "C": capacity, **own}
    return found


def _verifier(limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """A prompt is computed alone; a tree has at least a root and a node."""
    chunk, one, tree = (1, limits.chunk, limits.chunk), (1, 1, 1), _trees(limits)["T"]
    return {
        PREFILL: {**_buffers(limits), "B": (1, 1, 1), "T": chunk, "R": one},
        TOKEN: {**_buffers(limits), "T": one, "R": one},
        TREE: {**_buffers(limits), "T": tree, "R": tree},
    }


def _around_verification(limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """The graphs before and after a verification take one token or a tree."""
    return {TOKEN: {**_trees(limits), "T": (1, 1, 1)}, TREE: _trees(limits)}


def _compaction(limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Compaction runs for trees only: a single root is already in its place."""
    return {TREE: {**_buffers(limits), **_trees(limits)}}


def _gathering(limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Rows come from trees and prompts, and wait as pending features for a draft: few calls share sizes."""
    most = names.MAX_PENDING_FEATURES
    rows = (1, limits.tuned, most)
    return {TREE: {**_batch(limits), "F": rows, "T": rows, "W": (1, most, most)}}


def _storing(limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Trees are stored after every draft for several sequences."""
    return {TREE: _trees(limits)}


_SYMBOLS = {
    names.VERIFIER: _verifier, names.STEP_PREPARE_TREE: _around_verification, names.STEP_ACCEPT: _around_verification,
    names.STEP_ACCEPT_SAMPLED: _around_verification, names.STEP_COMPACT_KV: _compaction,
    names.STEP_GATHER_FEATURES: _gathering, names.STEP_STORE_TREES: _storing,
}  # fmt: skip


def _batch(limits: CallLimits) -> dict[str, Sizes]:
    """Engines are tuned for one sequence, which has the least work to hide latency."""
    return {"B": (1, 1, limits.batch)}


def _buffers(limits: CallLimits) -> dict[str, Sizes]:
    return {**_batch(limits), "C": (_SMALLEST_CACHE, limits.max_model_len, names.kv_rows(limits.max_model_len))}


def _trees(limits: CallLimits) -> dict[str, Sizes]:
    """T nodes of a call, K of a drafter's tree, S of a tree in the store."""
    tuned, widest = limits.tuned, limits.widest
    return {**_batch(limits), "T": (2, tuned, widest), "K": (1, tuned, widest), "S": (1, tuned, widest)}


def _range(spec: TensorSpec, sizes: Mapping[str, Sizes]) -> Range:
    least, tuned, most = (
        tuple(dim if isinstance(dim, int) else sizes[dim][which] for dim in spec.shape) for which in range(3)
    )
    return Range(least, tuned, most)
