"""The verifier on a device: trees go in, a verdict of a few integers comes out, everything between stays there.

One step is up to five programs over the same buffers, captured as one where the backend can:

    layout    parents -> mask, positions          verify   the engine
    accept    logits -> path, verdict             keep     accepted rows together, in all KV buffers
    collect   accepted feature rows -> where a drafter waits for them

The host writes lengths (and trees that it made itself), and reads the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from redraft import names
from redraft.engines.device import Buffer, Device, Run, byte_size
from redraft.names import VerifierShape
from redraft.runtime.device_frame import ChunkFrame, SlotMove, TreeFrame
from redraft.runtime.device_tree import DeviceTrees, same_trees
from redraft.runtime.metrics import Clock
from redraft.runtime.ranges import Ranges
from redraft.runtime.sampler import Greedy, OverTokens
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import PREFILL_CHUNK, PREFILL_STEP, Features, Verifier
from redraft.types import DraftTree, Outcome

GRAPHS = (names.VERIFIER, names.STEP_LAYOUT, names.STEP_ACCEPT, names.STEP_KEEP)


class Collector(Protocol):
    """Who wants feature rows: a drafter on the same device."""

    def bind(self, features: Mapping[str, Buffer], path: Buffer) -> Run:
        """What appends the rows features[tap][b, path[b, i]] to those that wait, for every sequence of the batch."""

    def announce(self, batch: Sequence[Request]) -> None:
        """The next call is over these sequences: where their rows will go."""


class DeviceVerifier(Verifier):
    """See the module. To the runtime a `Verifier`, but that its feature rows never reach the host: see `Collector`."""

    device: Device

    def __init__(
        self, device: Device, shape: VerifierShape, capacity: int, slots: int = 1, taps: tuple[str, ...] = ()
    ) -> None:
        self.capacity = capacity
        self.slots = slots
        self.vocabulary = shape.vocabulary
        self.clock = Clock()
        self.ranges = Ranges(self.clock)
        self.device = device
        self._collector: Collector | None = None
        self._taps = taps
        self._programs = {name: device.program(name) for name in GRAPHS}
        rows = slots * capacity * shape.kv_heads * shape.head_dim
        caches = names.caches(shape)
        dtypes = {spec.name: spec.dtype for spec in self._programs[names.VERIFIER].inputs}
        device.expect({"verifier's KV": sum(byte_size(dtypes[cache], (rows,)) for cache in caches)})
        self._state = {
            spec.name: device.empty(spec.dtype, slots, shape.kv_heads, capacity, shape.head_dim)
            for spec in self._programs[names.VERIFIER].inputs
            if spec.name in set(caches)
        }
        self._trees: dict[tuple[int, ...], TreeFrame] = {}
        self._chunks: dict[int, ChunkFrame] = {}
        self._copy_slot = SlotMove(device, names.STEP_MOVE, self._state)

    def attach(self, collector: Collector) -> None:
        """Let `collector` have the feature rows of every call from now on."""
        self._collector = collector
        self._trees.clear()
        self._chunks.clear()

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """See `Verifier.verify`. Trees that a drafter left on the device stay there."""
        made = same_trees(trees)
        if made and max([seq.past_len for seq in batch]) + made.width > self.capacity:
            made = None  # fewer nodes exist than the drafter's call has room for: from the host, where they are cut
        nodes = list(map(len, trees))
        frame = self._tree_frame(len(batch), made.width if made else max(nodes), made)
        with self.ranges.stage("fill"):
            if made is None:
                frame.place(trees)
            frame.start([seq.past_len for seq in batch], nodes)
            self._announce(batch)
        with self.ranges.stage("verify"), self.ranges.call(names.VERIFIER):
            if all(map(_judged_on_device, batch)):
                frame.step()
                return frame.outcomes(nodes)
            return _judge(frame, batch, trees)

    def prefill(self, seq: Request) -> Iterator[tuple[int, Features]]:
        """See `Verifier.prefill`; of the feature rows only their number is said."""
        prompt = np.array(seq.tokens[: seq.prompt_length], dtype=np.int64)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            padded = min(-(-len(chunk) // PREFILL_STEP) * PREFILL_STEP, self.capacity - start)
            self._latest = frame = self._chunk_frame(padded)
            frame.place(chunk, start)
            self._announce([seq])
            with self.ranges.stage("prefill"):
                frame.step()
            yield start, self.features(0, len(chunk))

    def first_outcome(self, seq: Request) -> Outcome:
        """See `Verifier.first_outcome`."""
        if _judged_on_device(seq):
            return self._latest.outcomes([1])[0]
        return seq.sampler.judge(self._latest.logits.read()[0], root_only(seq.tokens[-1]), seq.prompt_length - 1)

    def features(self, slot: int, nodes: int) -> Features:
        """Rows without columns, one a node: the values are the collector's."""
        return dict.fromkeys(self._taps, np.empty((nodes, 0), np.float32))

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`; all rows of the slot."""
        self._copy_slot(source, target)

    def measure_ms(self, sequences: int, nodes: int, live: int) -> float:
        """See `Verifier.measure_ms`."""
        frame = self._tree_frame(sequences, nodes, None)
        chain = DraftTree(np.zeros(nodes, np.int64), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))
        frame.place([chain] * sequences)
        frame.start([min(live, self.capacity - nodes)] * sequences, [nodes] * sequences)
        frame.wait()
        start = time.perf_counter()
        frame.verify()
        frame.wait()
        return (time.perf_counter() - start) * 1e3

    def _announce(self, batch: Sequence[Request]) -> None:
        if self._collector is not None:
            self._collector.announce(batch)

    def _tree_frame(self, sequences: int, width: int, made: DeviceTrees | None) -> TreeFrame:
        key = (sequences, width, made.tokens.address if made else 0)
        if key not in self._trees:
            collect = self._collector.bind if self._collector else None
            self._trees[key] = TreeFrame(self.device, self._programs, self._state, sequences, width, made, collect)
        return self._trees[key]

    def _chunk_frame(self, width: int) -> ChunkFrame:
        if width not in self._chunks:
            collect = self._collector.bind if self._collector else None
            self._chunks[width] = ChunkFrame(self.device, self._programs, self._state, width, collect)
        return self._chunks[width]


def _judged_on_device(seq: Request) -> bool:
    """Whether the accepting graph says what the sampler would."""
    return type(seq.sampler) is Greedy and seq.sampler.gaps is None


def _judge(frame: TreeFrame, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
    """The host's samplers decide: from the verifier's token at every node where that is enough, else from logits."""
    frame.verify()
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
