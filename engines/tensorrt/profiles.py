"""Optimization profiles of every graph: prefill chunks, one token, trees. TensorRT tunes an engine for each of them.

With two profiles, as is the custom, decoding without speculation would run kernels tuned for trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redraft import names
from redraft.engines.tensorrt.records import Profile, Range
from redraft.errors import UsageError
from redraft.names import TensorSpec

PREFILL, TOKEN, TREE = "prefill", "token", "tree"
_SMALLEST_CACHE = 2
Sizes = tuple[int, int, int]
"""Smallest, tuned and largest value of a symbol."""


@dataclass(frozen=True)
class Limits:
    """The largest calls that the engines must take.

    batch:     B, sequences.   tree: T, nodes of a tree, root included.   prefill: T, prompt tokens of a chunk.
    capacity:  C, rows of a sequence's KV buffer.
    """

    batch: int
    tree: int
    prefill: int
    capacity: int

    def __post_init__(self) -> None:
        if min(self.batch, self.prefill, self.tree - 1, self.capacity - 1) < 1:
            raise UsageError(f"expected sizes of at least one sequence, one token and a tree of two nodes, not {self}")
        for wanted, size in (("tree", self.tree), ("prefill", self.prefill)):
            if size > self.capacity:
                raise UsageError(
                    f"a {wanted} of {size} tokens does not fit in the context of {self.capacity}",
                    f"raise --context, or lower the {wanted}",
                )


def profiles_of(graph: str, inputs: Sequence[TensorSpec], limits: Limits, live_is_shape: bool) -> tuple[Profile, ...]:
    """The profiles of a graph of a bundle, in the engine's order; those that would be the same are one.

    live_is_shape: the values of `live` are sizes inside the graph, as without the plugin, and get ranges of their own.
    """
    found: list[Profile] = []
    for name, sizes in _symbols(graph, limits).items():
        ranges = {spec.name: _range(spec, sizes) for spec in inputs if any(isinstance(dim, str) for dim in spec.shape)}
        if live_is_shape and names.LIVE in {spec.name for spec in inputs}:
            rows = sizes["T"] if "T" in sizes else sizes["M"]
            ranges[names.LIVE] = Range((rows[0],), (max(limits.capacity // 2, rows[1]),), (sizes["C"][2],))
        if all(ranges != profile.inputs for profile in found):
            found.append(Profile(name, ranges))
    return tuple(found)


def largest_call(profiles: Sequence[Profile]) -> tuple[int, int]:
    """Sequences, and nodes of a tree with its root, that the verifier's engine takes at most."""
    batch, tree = next(profile.inputs[names.TOKEN_IDS].max for profile in profiles if profile.name == TREE)
    return batch, tree


def check_tree(largest: int, nodes: int) -> None:
    """Raise UsageError for a tree of `nodes`, root included, where engines take `largest`."""
    if nodes > largest:
        raise UsageError(
            f"a tree of {nodes} nodes, its root included, is larger than the {largest} that the engine's profile takes",
            f"lower --budget nodes to {largest - 1}, or build again with --tree-nodes {nodes}",
        )


def check_slots(largest: int, slots: int) -> None:
    """Raise UsageError for more sequences at once than engines take."""
    if slots > largest:
        raise UsageError(
            f"{slots} sequences at once are more than the {largest} that the engine's profiles take",
            f"lower the slots to {largest}, or build again with --batch {slots}",
        )


def _symbols(graph: str, limits: Limits) -> Mapping[str, Mapping[str, Sizes]]:
    """Sizes of the symbols by profile. A prompt is computed alone; a tree has at least a root and a node."""
    alone, several = (1, 1, 1), (1, 1, limits.batch)
    common = {"C": (_SMALLEST_CACHE, limits.capacity, limits.capacity)}
    if graph == names.VERIFIER:
        prefill, one, tree = (1, limits.prefill, limits.prefill), (1, 1, 1), (2, limits.tree, limits.tree)
        return {
            PREFILL: {**common, "B": alone, "T": prefill, "R": one},
            TOKEN: {**common, "B": several, "T": one, "R": one},
            TREE: {**common, "B": several, "T": tree, "R": tree},
        }
    if graph in (names.STEP_LAYOUT, names.STEP_ACCEPT):
        return {TOKEN: {"B": several, "T": (1, 1, 1)}, TREE: {"B": several, "T": (2, limits.tree, limits.tree)}}
    if graph == names.STEP_COLLECT:
        room = names.MOST_WAITING_ROWS
        rows_of = {"B": several, "F": (1, limits.tree, room), "T": (1, limits.tree, room), "W": (1, room, room)}
        return {TREE: rows_of}
    rows = min(names.CATCH_UP_ROWS, limits.capacity)
    common = {"C": (_SMALLEST_CACHE, limits.capacity, limits.capacity + names.CATCH_UP_ROWS + _MOST_STEPS)}
    return {
        PREFILL: {**common, "B": alone, "M": (1, rows, rows)},
        TOKEN: {**common, "B": several, "M": (1, 1, 1)},
        TREE: {**common, "B": several, "M": (1, min(_AFTER_A_TREE, rows), rows)},
    }


_MOST_STEPS = 64
"""Steps of a chain, whose rows lie beyond the context while a drafter runs."""
_AFTER_A_TREE = 4
"""Rows that a drafter typically catches up on after a verified tree: what was accepted, and the root."""


def _range(spec: TensorSpec, sizes: Mapping[str, Sizes]) -> Range:
    least, tuned, most = (
        tuple(dim if isinstance(dim, int) else sizes[dim][which] for dim in spec.shape) for which in range(3)
    )
    return Range(least, tuned, most)
