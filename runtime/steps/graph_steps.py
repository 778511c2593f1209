"""Steps as programs of a device: the host sends trees and receives a few integers, and all other values stay there.

A step is up to five programs over the same buffers. The backend captures them as one if it can, with the copies at
both ends:

    send            lengths and the host's trees, one block of integers
    prepare_tree    the host's trees or the store's -> tokens, mask, positions
    verify          the engine
    accept          logits -> path, accept_output           fetch    accept_output, to the host
    compact_kv      accepted rows together, in all KV buffers
    gather_features accepted feature rows -> a drafter's pending rows

Drafts run in the same order before the step, and the device computes them while the host prepares the step. One graph
of both would begin later. A draft writes its trees to the `TreeStore`, so that steps do not depend on the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

from redraft import names, signatures
from redraft.engines.device import Array, Device, byte_size
from redraft.engines.host_device import array_of
from redraft.runtime.steps.bound_step import BoundPrefill, BoundTreeStep, StepBuffers, slot_copy
from redraft.runtime.steps.interface import ChunkRows, Limits, Steps
from redraft.runtime.trees.device_tree import TreeStore
from redraft.signatures import VerifierShape
from redraft.types import Tree

GRAPHS = (
    names.VERIFIER, names.STEP_PREPARE_TREE, names.STEP_ACCEPT, names.STEP_ACCEPT_SAMPLED, names.STEP_COMPACT_KV,
)  # fmt: skip
MOST_STEPS = 128
"""Most step shapes in memory. The least recently used one is dropped first."""
MOST_PREFILLS = 64
"""Most shapes of prompt chunks in memory, by width and slot."""


class GraphSteps(Steps):
    """Steps of a device with graphs."""

    def __init__(self, device: Device, shape: VerifierShape, hidden_states: tuple[str, ...], limits: Limits) -> None:
        super().__init__(MOST_STEPS, MOST_PREFILLS, device.wait)
        self._limits = limits
        slot_rows = names.kv_rows(limits.max_model_len)
        rows = limits.slots * slot_rows * shape.kv_heads * shape.head_dim
        caches = signatures.caches(shape)
        widest = names.TREE_WIDTHS[-1]
        nodes = (limits.max_num_seqs, widest)
        parts = {
            "verifier's KV": len(caches) * byte_size(shape.kv_dtype, (rows,)),
            f"logits of {widest} nodes": byte_size("float32", (*nodes, shape.vocabulary)),
            f"features of {widest} nodes": len(hidden_states) * byte_size(shape.dtype, (*nodes, shape.hidden)),
        }
        device.expect(parts, GRAPHS)
        programs = {name: device.program(name) for name in GRAPHS}
        device.expect(parts)  # in addition to the engines' scratch memory, which is known once they are loaded
        sizes = (limits.slots, shape.kv_heads, slot_rows, shape.head_dim)
        state = {
            spec.name: device.empty(spec.dtype, *sizes)
            for spec in programs[names.VERIFIER].inputs
            if spec.name in set(caches)
        }
        self.store = TreeStore(device, limits.max_num_seqs, limits.drafted_tree)
        self._buffers = StepBuffers(device, programs, state, self.store, self.readers)
        self._copy_slot = slot_copy(device, names.STEP_COPY_SLOT, state)

    def move(self, source: int, target: int, rows: int) -> None:
        self._copy_slot(source, target, rows)

    def host_kv(self) -> list[Array]:
        return [array_of(buffer) for buffer in self._buffers.state.values()]

    def tree(
        self, trees: Sequence[Tree], cache_len: Sequence[int], chunks: Sequence[ChunkRows] = ()
    ) -> BoundTreeStep:  # fmt: skip
        key = len(trees), self._width(len(trees), max(map(len, trees)), max(cache_len))
        step: BoundTreeStep = self._trees.get(key, lambda: BoundTreeStep(self._buffers, *key))
        return step

    def prefill(self, width: int, slot: int) -> BoundPrefill:
        key = width, slot
        step: BoundPrefill = self._prefills.get(key, lambda: BoundPrefill(self._buffers, *key))
        return step

    def _width(self, sequences: int, nodes: int, cache_len: int) -> int:
        """Return the width of the smallest call that fits trees of `nodes` nodes."""
        if nodes * sequences < self.fewest_rows:
            nodes = -(-self.fewest_rows // sequences)
        width, limits = names.padded_width(nodes), self._limits
        return width if width + cache_len <= limits.max_model_len and width <= limits.largest_tree else nodes
