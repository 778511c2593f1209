"""The verifier computes prompts and trees, returns tokens, and holds the KV rows of every slot.

A slot is a row of the batch. The active sequences have slots 0, 1, … without a gap, so a call over B sequences reads
the first B slots of each buffer.

A step has five parts. It prepares and verifies the trees, and accepts tokens. Then it compacts the accepted rows in
the KV buffers, and gathers feature rows for drafters. On a GPU all parts are programs over the same buffers, captured
as one (`bound_step`). The host does all parts but verifying in NumPy, over arrays without padding (`host_step`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.device import Device
from redraft.runtime.observe.metrics import Clock
from redraft.runtime.observe.profiling import WAIT, StageTimers
from redraft.runtime.params import SamplingParams
from redraft.runtime.requests.batch import Chunk
from redraft.runtime.requests.request import Request, drafting
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.noise import draft_noise
from redraft.runtime.steps.interface import ChunkRows, FeatureReader, Limits, Steps
from redraft.runtime.trees.device_tree import calls_of
from redraft.runtime.trees.tree import chain
from redraft.signatures import VerifierShape
from redraft.types import FloatArray, IntArray, Outcome, Tree

PREFILL_CHUNK = 128
"""Prompt tokens computed in one call."""
PREFILL_STEP = 16
"""Widths of chunks on a device with step graphs are multiples of this. The host computes no padding."""
WARM_SLOTS = 8
"""Slots whose prompt chunks are run before the first request, and whose steps stay in memory."""


class Verifier:
    """The verifier of one bundle on one device. Only one thread may use it.

    `slots` is the number of sequences whose rows it holds, `max_model_len` the number of rows of a slot, `max_num_seqs`
    the largest batch, `vocabulary` the number of token ids. Drafters and cycle share `ranges` and its `clock`.
    """

    def __init__(  # noqa: PLR0913 - limits of a runtime
        self, device: Device, shape: VerifierShape, max_model_len: int, max_num_seqs: int = 1,
        hidden_states: tuple[str, ...] = (), largest_tree: int = sys.maxsize, drafted_tree: int = 1, slots: int = 0,
    ) -> None:  # fmt: skip
        """Load the verifier's programs. Raises BundleError, and BackendError if they do not fit the device.

        largest_tree: most nodes of a tree in one call, root included; `max_model_len` is a further limit.
        drafted_tree: nodes of the largest tree, root included, that a drafter leaves on the device.
        slots: sequences whose rows it holds, at least `max_num_seqs` and by default as many.
        """
        from redraft.runtime.steps.graph_steps import GraphSteps
        from redraft.runtime.steps.host_step import HostSteps

        self.device = device
        self._waits = device.step_graphs
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.vocabulary = shape.vocabulary
        self._positions = shape.max_positions
        self.block_rows = device.block_rows
        self.clock = Clock()
        self.ranges = StageTimers(self.clock)
        kind = GraphSteps if device.step_graphs else HostSteps
        self.largest_tree = largest_tree
        self.slots = max(slots, max_num_seqs)
        limits = Limits(self.slots, max_num_seqs, max_model_len, largest_tree, min(drafted_tree, largest_tree))
        self.steps: Steps = kind(device, shape, hidden_states, limits)
        self._warm = False

    @property
    def packed(self) -> bool:
        """True if a call's products compute the nodes of all trees, without padding."""
        return self.steps.packed

    @property
    def most_rows(self) -> int:
        """Rows of a packed call, at most: the kernels of rotations refuse more than the model has positions."""
        return self._positions if self.packed else sys.maxsize

    @property
    def branches(self) -> bool:
        """True if the verifier accepts trees that branch."""
        return self.steps.branches

    def close(self) -> None:
        """Release all memory. The verifier is unusable afterwards."""
        self.device.wait()
        self.steps.close()
        self.__dict__.pop("_latest", None)
        self.device.close()

    def attach(self, reader: FeatureReader) -> None:
        """Gather hidden states for `reader` in every call from now on."""
        self.device.wait()
        self._warm = False
        self.steps.attach(reader)

    def detach(self, reader: FeatureReader) -> None:
        """Gather nothing for `reader` from now on."""
        self.device.wait()
        self.steps.detach(reader)

    def take_branches(self) -> None:
        """Prepare for trees that branch, if the device can. Raises BackendError if memory does not allow it."""
        self.__dict__.pop("_latest", None)  # a step of the engine that may be replaced
        self.steps.take_branches()

    @property
    def cold(self) -> bool:
        """True if `warm` has shapes to run."""
        return self.device.asynchronous and not self._warm

    def warm(self) -> None:
        """Run each shape of a call until it is prepared, so that no request waits for that.

        Only an asynchronous device has such shapes. Overwrites KV rows, so no request may be running.
        """
        if not self.cold:
            return
        self._warm = True
        for sequences in sorted({1, self.max_num_seqs}, reverse=True):  # the largest first: others reuse its memory
            self._warm_trees(sequences)
        widths = range(PREFILL_STEP, min(PREFILL_CHUNK, self.max_model_len) + 1, PREFILL_STEP)
        for slot in range(min(self.max_num_seqs, WARM_SLOTS)):
            for width in widths:
                step = self.steps.prefill(width, slot)
                for _ in range(2):
                    step.fill(np.zeros(width, np.int64), 0, [[0]] * len(self.steps.readers))
                    step.run()
                    self.device.wait()

    def _warm_trees(self, sequences: int) -> None:
        """Run a step of every width twice for greedy requests, and twice for sampled ones."""
        widest = min(self.largest_tree, self.max_model_len)
        for width in [width for width in reversed(names.TREE_WIDTHS) if width <= widest]:
            trees = [blank(width)] * sequences
            step = self.steps.tree(trees, [0] * sequences)
            for batch in ((), [sampled()] * sequences):
                for _ in range(2):
                    step.fill([0] * sequences, trees, [[0] * sequences] * len(self.steps.readers), batch)
                    step.run(True)
                    self.device.wait()

    def verify(
        self, batch: Sequence[Request], trees: Sequence[Tree], made: Sequence[Tree] = (), chunks: Sequence[Chunk] = ()
    ) -> list[Outcome]:  # fmt: skip
        """Verify one tree of every sequence in one engine call, and make the rows of accepted paths contiguous.

        Sequence i has slot i; cache_len + the largest tree must fit in `max_model_len`. Trees on the device stay there.
        Raises ValueError for a tree that was drafted for another slot.
        made: all trees of this step's drafter calls, whose time on the device does not count as verification.
        chunks: rows of prompts, of other requests, to compute in the same call, if the steps take them.
        """
        stage = self.ranges.stage
        cache_len = [seq.num_computed_tokens for seq in batch]
        slots = range(len(batch))
        most = max(map(len, trees))
        pending = [_pending(reader, batch, most, slots) for reader in self.steps.readers]
        beside = [self._chunk_rows(chunk) for chunk in sorted(chunks, key=lambda chunk: chunk.request.slot)]
        whole = self._waits and all([seq.sampler.device_temperature is not None for seq in batch])
        with stage("fill"):
            step = self.steps.tree(trees, cache_len, beside)
            step.fill(cache_len, trees, pending, batch)
        with stage("verify"), self.ranges.call(names.VERIFIER):
            step.run(whole)
            if self._waits:
                with stage(WAIT):
                    self.device.wait()
        if whole:  # `run` has accepted already
            outcomes = step.outcomes(batch, trees)
        else:
            with stage("accept"):
                outcomes = step.outcomes(batch, trees)
        if self.device.asynchronous and (calls := calls_of([*trees, *made])):
            own = step.seconds()
            for call in calls:
                self.ranges.waited_for(call.stage, call.work.seconds(), own)
        return outcomes

    def _chunk_rows(self, chunk: Chunk) -> ChunkRows:
        request, start, tokens = chunk
        slots = range(request.slot, request.slot + 1)
        pending = [_pending(reader, [request], tokens, slots) for reader in self.steps.readers]
        return ChunkRows(request.slot, start, np.array(request.tokens[start : start + tokens], np.int64), pending)

    def compute(self, request: Request, start: int, tokens: int) -> None:
        """Compute rows of a request in its slot: `tokens` of them from position `start` on, at most PREFILL_CHUNK."""
        slots = range(request.slot, request.slot + 1)
        multiple = PREFILL_STEP if self.device.step_graphs else 1
        rows = max(tokens, self.steps.fewest_rows)
        width = min(-(-rows // multiple) * multiple, self.max_model_len - start)
        step = self.steps.prefill(width, request.slot)
        chunk = np.array(request.tokens[start : start + tokens], np.int64)
        step.fill(chunk, start, [_pending(reader, [request], width, slots) for reader in self.steps.readers])
        with self.ranges.call(names.VERIFIER):
            step.run()
            self.device.wait()

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy at least the first `rows` rows of slot `source` to slot `target`."""
        self.steps.move(source, target, rows)

    def release(self, slot: int) -> None:
        """Give the memory of a slot's rows back to the machine, if the device can. Nobody may read them again."""
        self.steps.release(slot)

    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        """Return milliseconds of a call over `sequences` chains of `nodes` nodes after `kv_len` rows.

        It overwrites later rows. On a device with step graphs, it times the whole step, its wait included.
        """
        cache_len = min(kv_len, self.max_model_len - max(nodes, 2))  # one sequence's graph computes a single row twice
        trees = [blank(nodes)] * sequences
        step = self.steps.tree(trees, [cache_len] * sequences)
        step.fill([cache_len] * sequences, trees, [[0] * sequences] * len(self.steps.readers))
        self.device.wait()
        start = time.perf_counter()
        step.run(True)
        self.device.wait()
        return (time.perf_counter() - start) * 1e3

    def logits(self, trees: Sequence[Tree], cache_lens: Sequence[int]) -> list[FloatArray]:
        """Return logits [nodes, V] of one tree a slot, from slot 0 on, after `cache_lens` rows. Overwrites KV rows."""
        step = self.steps.tree(trees, cache_lens)
        step.fill(cache_lens, trees, [None] * len(self.steps.readers))
        step.run(False)
        self.device.wait()
        return [logits.copy() for logits in step.tree_logits(trees)]

    def chunk_logits(self, tokens: IntArray, start: int, width: int) -> FloatArray:
        """Return logits [1, V] after part of a prompt, computed as in `prefill`."""
        step = self.steps.prefill(width, 0)
        step.fill(tokens, start, [None] * len(self.steps.readers))
        step.run()
        self.device.wait()
        return step.logits.read()[0, :1]


def open_verifier(
    bundle: Bundle, device: Device, max_num_seqs: int = 1, max_model_len: int | None = None,
    largest_tree: int = sys.maxsize, slots: int = 0,
) -> Verifier:  # fmt: skip
    """Open the bundle's verifier on a device, with rows for the model's context or for `max_model_len` tokens."""
    manifest = bundle.manifest
    rows = max_model_len or manifest.max_model_len
    drafted_tree = 1 + max([drafter.limits.nodes for drafter in manifest.drafters.values()], default=0)
    states = manifest.hidden_states
    return Verifier(device, manifest.shape, rows, max_num_seqs, states, largest_tree, drafted_tree, slots)


def _pending(reader: FeatureReader, batch: Sequence[Request], rows: int, slots: range) -> list[int] | None:
    """Return what `FeatureReader.pending` does. If it fails, the requests that it reads for go on without drafts."""
    with drafting(*[request for request in batch if reader in request.drafting]):
        return reader.pending(batch, rows, slots)
    return None


def blank(nodes: int) -> Tree:
    """Return a chain of token 0."""
    return chain(np.zeros(nodes, np.int64))


def sampled() -> Request:
    """Return a request with a temperature."""
    params = SamplingParams(temperature=1.0)
    return Request([0], 1, 1, frozenset(), make_sampler(params), noise=draft_noise(params))
