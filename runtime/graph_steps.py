"""Steps as programs of a device: trees go in, a few integers come out, everything between stays there.

One step is up to five programs over the same buffers, captured as one if the backend can, with the copies at its
ends:

    send            lengths and the host's trees, one block of integers
    prepare_tree    tree -> tokens, mask, positions         verify   the engine
    accept          logits -> path, accept_output           fetch    accept_output, to the host
    compact_kv      accepted rows together, in all KV buffers
    gather_features accepted feature rows -> where a drafter keeps those that are pending

A draft is put in order before it in the same way, and the device works on it while the host prepares the step: one
graph of both would begin later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from redraft import names, signatures
from redraft.engines.device import Device, byte_size
from redraft.runtime.bound_step import BoundPrefill, BoundTreeStep, StepBuffers, slot_copy
from redraft.runtime.device_tree import DeviceTrees
from redraft.runtime.limits import Limits
from redraft.signatures import VerifierShape
from redraft.types import DraftTree

if TYPE_CHECKING:
    from redraft.runtime.verifier import FeatureReader

GRAPHS = (names.VERIFIER, names.STEP_PREPARE_TREE, names.STEP_ACCEPT, names.STEP_COMPACT_KV)
MOST_STEPS = 128
"""Shapes of a step that are kept; the one that was not used for longest goes when there are more."""


class GraphSteps:
    """See the module and `redraft.runtime.verifier.Steps`."""

    branches = True
    prefers_chains = False

    def __init__(self, device: Device, shape: VerifierShape, hidden_states: tuple[str, ...], limits: Limits) -> None:
        self.fewest_rows = 1
        self._device = device
        self._limits = limits
        rows = limits.max_num_seqs * limits.max_model_len * shape.kv_heads * shape.head_dim
        caches = signatures.caches(shape)
        widest = names.TREE_WIDTHS[-1]
        nodes = (limits.max_num_seqs, widest)
        parts = {
            "verifier's KV": len(caches) * byte_size(shape.dtype, (rows,)),
            f"logits of {widest} nodes": byte_size("float32", (*nodes, shape.vocabulary)),
            f"features of {widest} nodes": len(hidden_states) * byte_size(shape.dtype, (*nodes, shape.hidden)),
        }
        device.expect(parts, GRAPHS)
        programs = {name: device.program(name) for name in GRAPHS}
        device.expect(parts)  # beside the engines' scratch memory, whose size they tell once they are loaded
        sizes = (limits.max_num_seqs, shape.kv_heads, limits.max_model_len, shape.head_dim)
        state = {
            spec.name: device.empty(spec.dtype, *sizes)
            for spec in programs[names.VERIFIER].inputs
            if spec.name in set(caches)
        }
        self._buffers = StepBuffers(device, programs, state)
        self._trees: dict[tuple[int, int, int], BoundTreeStep] = {}
        self._chunks: dict[int, BoundPrefill] = {}
        self._copy_slot = slot_copy(device, names.STEP_COPY_SLOT, state)

    def attach(self, reader: FeatureReader) -> None:
        """See `Steps.attach`."""
        self._buffers.readers.append(reader)
        self.forget()

    def detach(self, reader: FeatureReader) -> None:
        """See `Steps.detach`."""
        self._buffers.readers.remove(reader)
        self.forget()

    def forget(self) -> None:
        """See `Steps.forget`."""
        self._trees.clear()
        self._chunks.clear()

    def close(self) -> None:
        """See `Steps.close`."""
        self.forget()
        self._buffers.readers.clear()

    def take_branches(self) -> None:
        """See `Steps.take_branches`."""

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Steps.move`; all rows of the slot."""
        self._copy_slot(source, target, rows)

    def tree(self, trees: Sequence[DraftTree], cache_len: Sequence[int], made: DeviceTrees | None) -> BoundTreeStep:
        """See `Steps.tree`. A step that was not used for longest goes when there are more than `MOST_STEPS`."""
        width = self._width(len(trees), max(map(len, trees)), max(cache_len))
        key = (len(trees), width, made.tokens.address if made else 0)
        step = self._trees.pop(key, None)
        if step is None:
            if len(self._trees) >= MOST_STEPS:
                self._device.wait()
                del self._trees[next(iter(self._trees))]
            step = BoundTreeStep(self._buffers, len(trees), width, made)
        self._trees[key] = step  # the last, so that the first is the one that was not used for longest
        return step

    def prefill(self, width: int) -> BoundPrefill:
        """See `Steps.prefill`."""
        if width not in self._chunks:
            self._chunks[width] = BoundPrefill(self._buffers, width)
        return self._chunks[width]

    def _width(self, sequences: int, nodes: int, cache_len: int) -> int:
        """Nodes that a call has space for which verifies trees of so many."""
        nodes = max(nodes, -(-self.fewest_rows // sequences))
        width = names.padded_width(nodes)
        fits = width <= min(self._limits.max_model_len - cache_len, self._limits.largest_tree)
        return width if fits else nodes
