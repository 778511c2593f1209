"""The verifier on a device: trees go in, a few integers come out, everything between stays there.

One step is up to five programs over the same buffers, captured as one where the backend can, with the copies at its
ends:

    send      lengths and the host's trees, one block of integers
    layout    tree -> tokens, mask, positions     verify   the engine
    accept    logits -> path, accept_output       fetch    accept_output, to the host
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
from redraft.runtime.bound_step import BoundPrefill, BoundTreeStep, SlotMove, StepBuffers
from redraft.runtime.device_tree import DeviceTrees, one_source
from redraft.runtime.ranges import WAIT
from redraft.runtime.sampler import Greedy, OverTokens
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import root_only
from redraft.runtime.verifier import PREFILL_CHUNK, PREFILL_STEP, Features, Verifier
from redraft.signatures import VerifierShape
from redraft.types import DraftTree, IntArray, Outcome

GRAPHS = (names.VERIFIER, names.STEP_PREPARE_TREE, names.STEP_ACCEPT, names.STEP_COMPACT_KV)
MOST_STEPS = 128
"""Shapes of a step that are kept; the one that was not used for longest goes when there are more."""


class Collector(Protocol):
    """Who wants feature rows: a drafter on the same device."""

    def bind(self, features: Mapping[str, Buffer], path: Buffer, start: Buffer) -> Run:
        """What puts the rows features[name][b, path[b, i]] at start[b] + i of those that are pending, for every
        sequence.
        """

    def pending(self, batch: Sequence[Request]) -> list[int]:
        """How many rows of each sequence wait, with room for those of the next call."""


class DeviceVerifier(Verifier):
    """See the module. To the runtime a `Verifier`, but that its feature rows never reach the host: see `Collector`."""

    device: Device

    def __init__(
        self,
        device: Device,
        shape: VerifierShape,
        max_model_len: int,
        max_num_seqs: int = 1,
        hidden_states: tuple[str, ...] = (),
    ) -> None:
        super().__init__(shape, max_model_len, max_num_seqs, hidden_states)
        self.device = device
        rows = max_num_seqs * max_model_len * shape.kv_heads * shape.head_dim
        caches = signatures.caches(shape)
        widest = names.TREE_WIDTHS[-1]
        parts = {
            "verifier's KV": len(caches) * byte_size(shape.dtype, (rows,)),
            f"logits of {widest} nodes": byte_size("float32", (max_num_seqs, widest, shape.vocabulary)),
            f"features of {widest} nodes": len(hidden_states)
            * byte_size(shape.dtype, (max_num_seqs, widest, shape.hidden)),
        }
        device.expect(parts, GRAPHS)
        programs = {name: device.program(name) for name in GRAPHS}
        device.expect(parts)  # beside the engines' scratch memory, whose size they tell once they are loaded
        self._state = {
            spec.name: device.empty(spec.dtype, max_num_seqs, shape.kv_heads, max_model_len, shape.head_dim)
            for spec in programs[names.VERIFIER].inputs
            if spec.name in set(caches)
        }
        self._shared = StepBuffers(device, programs, self._state)
        self._collector: Collector | None = None
        self._trees: dict[tuple[int, int, int], BoundTreeStep] = {}
        self._chunks: dict[int, BoundPrefill] = {}
        self._rows_alone: dict[int, Features] = {}
        self._warm = False
        self._copy_slot = SlotMove(device, names.STEP_COPY_SLOT, self._state)

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
        for sequences in sorted(
            {1, self.max_num_seqs}, reverse=True
        ):  # the largest first, whose memory does for the others
            self.warm_trees(sequences)
        for width in range(PREFILL_STEP, min(PREFILL_CHUNK, self.max_model_len) + 1, PREFILL_STEP):
            step = self._prefill_step(width)
            for _ in range(2):
                step.fill(np.zeros(width, np.int64), 0, [0])
                step.step()
                self.device.wait()

    def warm_trees(self, sequences: int, made: DeviceTrees | None = None) -> None:
        """Run a step of every width twice, over the trees of a drafter's call where one `made` them."""
        widest = min(self.largest_tree, self.max_model_len)
        for width in [width for width in reversed(names.TREE_WIDTHS) if width <= widest]:
            step = self._tree_step(sequences, width, made)
            trees = [made.tree(slot, min(width, made.width)) if made else chain(width) for slot in range(sequences)]
            for _ in range(2):
                step.fill([0] * sequences, trees, list(map(len, trees)), [0] * sequences)
                step.step()
                self.device.wait()

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """See `Verifier.verify`. Trees that a drafter left on the device stay there.

        Raises ValueError where two calls of a drafter made them.
        """
        made = one_source(trees)
        nodes, cache_len = list(map(len, trees)), [seq.cache_len for seq in batch]
        pending = self._collector.pending(batch) if self._collector is not None else []
        with self.ranges.stage("fill"):
            step = self._tree_step(len(batch), self._width(max(nodes), max(cache_len)), made)
            step.fill(cache_len, trees, nodes, pending)
        with self.ranges.stage("verify"), self.ranges.call(names.VERIFIER):
            if _is_verified_on_device(batch):
                work = step.step
                work()
                with self.ranges.stage(WAIT):
                    self.device.wait()
                outcomes = step.outcomes(nodes)
            else:
                work = step.verify
                outcomes = _verify_by_samplers(step, batch, trees, self.device)
        if made is not None and self.device.asynchronous:
            self.ranges.waited_for(made.stage, made.work.seconds(), work.seconds())
        return outcomes

    def prefill_chunk(self, seq: Request, tokens: IntArray, start: int, width: int) -> Features:
        """See `Verifier.prefill_chunk`; of the feature rows only their number is said."""
        self._latest = step = self._prefill_step(width)
        step.fill(tokens, start, self._collector.pending([seq]) if self._collector is not None else [])
        with self.ranges.stage("prefill"):
            step.step()
        return self.features(0, len(tokens))

    def first_outcome(self, seq: Request) -> Outcome:
        """See `Verifier.first_outcome`."""
        self.device.wait()
        if _is_verified_on_device([seq]):
            return self._latest.outcomes([1])[0]
        return seq.sampler.verify(self._latest.logits.read()[0], root_only(seq.tokens[-1]), seq.prompt_length - 1)

    def features(self, slot: int, nodes: int) -> Features:
        """Rows without columns, one a node: the values are the collector's."""
        found = self._rows_alone.get(nodes)
        if found is None:
            found = self._rows_alone[nodes] = dict.fromkeys(self._hidden_states, np.empty((nodes, 0), np.float32))
        return found

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`; all rows of the slot."""
        self._copy_slot(source, target)

    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        """See `Verifier.measure_ms`; all that a step puts in order, the wait for its answer included."""
        cache_len = min(kv_len, self.max_model_len - nodes)
        step = self._tree_step(sequences, self._width(nodes, cache_len), None)
        step.fill([cache_len] * sequences, [chain(nodes)] * sequences, [nodes] * sequences, [0] * sequences)
        self.device.wait()
        start = time.perf_counter()
        step.step()
        self.device.wait()
        return (time.perf_counter() - start) * 1e3

    def _width(self, nodes: int, cache_len: int) -> int:
        """Nodes that a call has room for which verifies trees of so many."""
        width = names.padded_width(nodes)
        return width if width <= min(self.max_model_len - cache_len, self.largest_tree) else nodes

    def _tree_step(self, sequences: int, width: int, made: DeviceTrees | None) -> BoundTreeStep:
        key = (sequences, width, made.tokens.address if made else 0)
        step = self._trees.pop(key, None)
        if step is None:
            if len(self._trees) >= MOST_STEPS:
                self.device.wait()
                del self._trees[next(iter(self._trees))]
            collect = self._collector.bind if self._collector else None
            step = BoundTreeStep(self._shared, sequences, width, made, collect)
        self._trees[key] = step  # the last, so that the first is the one that was not used for longest
        return step

    def _prefill_step(self, width: int) -> BoundPrefill:
        if width not in self._chunks:
            collect = self._collector.bind if self._collector else None
            self._chunks[width] = BoundPrefill(self._shared, width, collect)
        return self._chunks[width]


def chain(nodes: int) -> DraftTree:
    """A tree of one branch."""
    return DraftTree(np.zeros(nodes, np.int64), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))


def _is_verified_on_device(batch: Sequence[Request]) -> bool:
    """Whether the accepting graph says what the samplers would."""
    return all([type(seq.sampler) is Greedy and seq.sampler.logit_margins is None for seq in batch])


def _verify_by_samplers(
    step: BoundTreeStep, batch: Sequence[Request], trees: Sequence[DraftTree], device: Device
) -> list[Outcome]:
    """The host's samplers decide: from the verifier's token at every node where that is enough, else from logits."""
    step.verify()
    device.wait()
    said = [outcome.target_token_ids for outcome in step.outcomes(list(map(len, trees)))]
    outcomes, logits = [], None
    for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
        if isinstance(seq.sampler, OverTokens):
            outcomes.append(seq.sampler.accept(said[slot], tree, seq.cache_len))
        else:
            logits = step.logits.read() if logits is None else logits
            outcomes.append(seq.sampler.verify(logits[slot, : len(tree)], tree, seq.cache_len))
    step.settle([outcome.path for outcome in outcomes])
    return outcomes
