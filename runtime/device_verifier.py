"""The verifier on a device: trees go in, a verdict of a few integers comes out, everything between stays there.

One step is up to five programs over the same buffers, captured as one where the backend can, with the copies at its
ends:

    send      lengths and the host's trees, one block of integers
    layout    tree -> tokens, mask, positions     verify   the engine
    accept    logits -> path, verdict             fetch    the verdict, to the host
    keep      accepted rows together, in all KV buffers
    collect   accepted feature rows -> where a drafter waits for them

A draft is put in order before it in the same way, and the device works on it while the host prepares the step: one
graph of both would begin later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from redraft import names, signatures
from redraft.engines.device import Buffer, Device, Run, byte_size
from redraft.runtime.device_frame import ChunkFrame, Room, SlotMove, TreeFrame
from redraft.runtime.device_tree import DeviceTrees, one_source
from redraft.runtime.ranges import WAIT
from redraft.runtime.sampler import Greedy, OverTokens
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import PREFILL_CHUNK, PREFILL_STEP, Features, Verifier
from redraft.signatures import VerifierShape
from redraft.types import DraftTree, IntArray, Outcome

GRAPHS = (names.VERIFIER, names.STEP_LAYOUT, names.STEP_ACCEPT, names.STEP_KEEP)
MOST_FRAMES = 128
"""Shapes of a step that are kept; the one that was not used for longest goes when there are more."""


class Collector(Protocol):
    """Who wants feature rows: a drafter on the same device."""

    def bind(self, features: Mapping[str, Buffer], path: Buffer, start: Buffer) -> Run:
        """What puts the rows features[tap][b, path[b, i]] at start[b] + i of those that wait, for every sequence."""

    def waiting(self, batch: Sequence[Request]) -> list[int]:
        """How many rows of each sequence wait, with room for those of the next call."""


class DeviceVerifier(Verifier):
    """See the module. To the runtime a `Verifier`, but that its feature rows never reach the host: see `Collector`."""

    device: Device

    def __init__(
        self, device: Device, shape: VerifierShape, capacity: int, slots: int = 1, taps: tuple[str, ...] = ()
    ) -> None:
        super().__init__(shape, capacity, slots, taps)
        self.device = device
        rows = slots * capacity * shape.kv_heads * shape.head_dim
        caches = signatures.caches(shape)
        widest = names.TREE_WIDTHS[-1]
        parts = {
            "verifier's KV": len(caches) * byte_size(shape.dtype, (rows,)),
            f"logits of {widest} nodes": byte_size("float32", (slots, widest, shape.vocabulary)),
            f"features of {widest} nodes": len(taps) * byte_size(shape.dtype, (slots, widest, shape.hidden)),
        }
        device.expect(parts, GRAPHS)
        programs = {name: device.program(name) for name in GRAPHS}
        device.expect(parts)  # beside the engines' scratch memory, whose size they tell once they are loaded
        self._state = {
            spec.name: device.empty(spec.dtype, slots, shape.kv_heads, capacity, shape.head_dim)
            for spec in programs[names.VERIFIER].inputs
            if spec.name in set(caches)
        }
        self._room = Room(device, programs, self._state)
        self._collector: Collector | None = None
        self._trees: dict[tuple[int, int, int], TreeFrame] = {}
        self._chunks: dict[int, ChunkFrame] = {}
        self._rows_alone: dict[int, Features] = {}
        self._warm = False
        self._copy_slot = SlotMove(device, names.STEP_MOVE, self._state)

    def attach(self, collector: Collector) -> None:
        """Let `collector` have the feature rows of every call from now on."""
        self.device.wait()
        self._collector = collector
        self._warm = False
        self._trees.clear()
        self._chunks.clear()

    def close(self) -> None:
        """See `Verifier.close`: everything on the device is given back with the last one that holds this."""
        self.device.wait()
        self._collector = None
        self._trees.clear()
        self._chunks.clear()
        self.device.close()

    def warm(self) -> None:
        """See `Verifier.warm`: steps over the host's trees, for one sequence and for all slots, and prompts."""
        if self._warm or not self.device.asynchronous:
            return
        self._warm = True
        for sequences in sorted({1, self.slots}, reverse=True):  # the largest first, whose memory does for the others
            self.warm_trees(sequences)
        for width in range(PREFILL_STEP, min(PREFILL_CHUNK, self.capacity) + 1, PREFILL_STEP):
            frame = self._chunk_frame(width)
            for _ in range(2):
                frame.fill(np.zeros(width, np.int64), 0, [0])
                frame.step()
                self.device.wait()

    def warm_trees(self, sequences: int, made: DeviceTrees | None = None) -> None:
        """Run a step of every width twice, over the trees of a drafter's call where one `made` them."""
        widest = min(self.largest_tree, self.capacity)
        for width in [width for width in reversed(names.TREE_WIDTHS) if width <= widest]:
            frame = self._tree_frame(sequences, width, made)
            trees = [made.tree(slot, min(width, made.width)) if made else chain(width) for slot in range(sequences)]
            for _ in range(2):
                frame.fill([0] * sequences, trees, list(map(len, trees)), [0] * sequences)
                frame.step()
                self.device.wait()

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """See `Verifier.verify`. Trees that a drafter left on the device stay there.

        Raises ValueError where two calls of a drafter made them.
        """
        made = one_source(trees)
        nodes, past_len = list(map(len, trees)), [seq.past_len for seq in batch]
        waiting = self._collector.waiting(batch) if self._collector is not None else []
        with self.ranges.stage("fill"):
            frame = self._tree_frame(len(batch), self._width(max(nodes), max(past_len)), made)
            frame.fill(past_len, trees, nodes, waiting)
        with self.ranges.stage("verify"), self.ranges.call(names.VERIFIER):
            if _judged_on_device(batch):
                work = frame.step
                work()
                with self.ranges.stage(WAIT):
                    self.device.wait()
                outcomes = frame.outcomes(nodes)
            else:
                work = frame.verify
                outcomes = _judge(frame, batch, trees, self.device)
        if made is not None and self.device.asynchronous:
            self.ranges.waited_for(made.stage, made.work.seconds(), work.seconds())
        return outcomes

    def prefill_chunk(self, seq: Request, tokens: IntArray, start: int, width: int) -> Features:
        """See `Verifier.prefill_chunk`; of the feature rows only their number is said."""
        self._latest = frame = self._chunk_frame(width)
        frame.fill(tokens, start, self._collector.waiting([seq]) if self._collector is not None else [])
        with self.ranges.stage("prefill"):
            frame.step()
        return self.features(0, len(tokens))

    def first_outcome(self, seq: Request) -> Outcome:
        """See `Verifier.first_outcome`."""
        self.device.wait()
        if _judged_on_device([seq]):
            return self._latest.outcomes([1])[0]
        return seq.sampler.judge(self._latest.logits.read()[0], root_only(seq.tokens[-1]), seq.prompt_length - 1)

    def features(self, slot: int, nodes: int) -> Features:
        """Rows without columns, one a node: the values are the collector's."""
        found = self._rows_alone.get(nodes)
        if found is None:
            found = self._rows_alone[nodes] = dict.fromkeys(self._taps, np.empty((nodes, 0), np.float32))
        return found

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`; all rows of the slot."""
        self._copy_slot(source, target)

    def measure_ms(self, sequences: int, nodes: int, live: int) -> float:
        """See `Verifier.measure_ms`; all that a step puts in order, the wait for its verdict included."""
        past_len = min(live, self.capacity - nodes)
        frame = self._tree_frame(sequences, self._width(nodes, past_len), None)
        frame.fill([past_len] * sequences, [chain(nodes)] * sequences, [nodes] * sequences, [0] * sequences)
        self.device.wait()
        start = time.perf_counter()
        frame.step()
        self.device.wait()
        return (time.perf_counter() - start) * 1e3

    def _width(self, nodes: int, past_len: int) -> int:
        """Nodes that a call has room for which verifies trees of so many."""
        width = names.padded_width(nodes)
        return width if width <= min(self.capacity - past_len, self.largest_tree) else nodes

    def _tree_frame(self, sequences: int, width: int, made: DeviceTrees | None) -> TreeFrame:
        key = (sequences, width, made.tokens.address if made else 0)
        frame = self._trees.pop(key, None)
        if frame is None:
            if len(self._trees) >= MOST_FRAMES:
                self.device.wait()
                del self._trees[next(iter(self._trees))]
            collect = self._collector.bind if self._collector else None
            frame = TreeFrame(self._room, sequences, width, made, collect)
        self._trees[key] = frame  # the last, so that the first is the one that was not used for longest
        return frame

    def _chunk_frame(self, width: int) -> ChunkFrame:
        if width not in self._chunks:
            collect = self._collector.bind if self._collector else None
            self._chunks[width] = ChunkFrame(self._room, width, collect)
        return self._chunks[width]


def chain(nodes: int) -> DraftTree:
    """A tree of one branch."""
    return DraftTree(np.zeros(nodes, np.int64), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))


def _judged_on_device(batch: Sequence[Request]) -> bool:
    """Whether the accepting graph says what the samplers would."""
    return all([type(seq.sampler) is Greedy and seq.sampler.gaps is None for seq in batch])


def _judge(frame: TreeFrame, batch: Sequence[Request], trees: Sequence[DraftTree], device: Device) -> list[Outcome]:
    """The host's samplers decide: from the verifier's token at every node where that is enough, else from logits."""
    frame.verify()
    device.wait()
    said = [outcome.node_tokens for outcome in frame.outcomes(list(map(len, trees)))]
    outcomes, logits = [], None
    for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
        if isinstance(seq.sampler, OverTokens):
            outcomes.append(seq.sampler.accept(said[slot], tree, seq.past_len))
        else:
            logits = frame.logits.read() if logits is None else logits
            outcomes.append(seq.sampler.judge(logits[slot, : len(tree)], tree, seq.past_len))
    frame.settle([outcome.path for outcome in outcomes])
    return outcomes
