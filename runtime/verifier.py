"""The verifier: trees and prompts go in, tokens come out, and it keeps the KV rows of every slot.

A slot is a row of the batch. Active sequences occupy slots 0, 1, … without a gap, so that a call over B sequences
reads the first B slots of each buffer.

A step has five parts: the tree is prepared, verified, accepted, its accepted rows are compacted in the KV buffers, and
its feature rows are gathered for drafters. On a GPU all of them are programs over the same buffers, captured as one
(`bound_step`). The host does all but verifying itself, over arrays without padding (`host_step`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.device import Buffer, Device
from redraft.runtime.device_tree import DeviceTrees, one_source
from redraft.runtime.limits import Limits
from redraft.runtime.metrics import Clock
from redraft.runtime.ranges import WAIT, Ranges
from redraft.runtime.sampler import Greedy
from redraft.runtime.sequence import Sequence as Request
from redraft.runtime.tree import chain, root_only
from redraft.signatures import VerifierShape
from redraft.types import DraftTree, FloatArray, IntArray, Outcome

PREFILL_CHUNK = 128
"""Prompt tokens computed in one call."""
PREFILL_STEP = 16


class FeatureReader(Protocol):
    """A drafter that reads hidden states: rows of accepted tokens are gathered in buffers of its own."""

    def pending_features(self, sequences: int) -> Mapping[str, Buffer]:
        """Buffers [B, W, n] of the first sequences, by hidden state."""

    def pending(self, batch: Sequence[Request], rows: int) -> list[int] | None:
        """How many rows of each sequence are pending, with space for so many more; None if it reads nothing now."""


class TreeStep(Protocol):
    """A step over trees of one set of sizes, bound to its buffers."""

    def fill(
        self, cache_len: Sequence[int], trees: Sequence[DraftTree], pending: Sequence[Sequence[int] | None]
    ) -> None:
        """Set what the next run is over: rows of the sequences, their trees, pending rows by reader."""

    def verify(self) -> None:
        """Run the engine, and what prepares its inputs."""

    def run(self) -> None:
        """Run all parts of the step."""

    def seconds(self, whole: bool) -> float:
        """How long the latest `run`, or `verify` if not `whole`, took on an asynchronous device."""

    def outcomes(self, nodes: Sequence[int]) -> list[Outcome]:
        """Return what `run` accepted of trees of so many nodes, once the device has been waited for."""

    def accept(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """Let the samplers decide after `verify`, compact the rows of the accepted paths, and gather their features."""

    @property
    def logits(self) -> Buffer:
        """Logits [B, R, V] of the latest call."""


class PrefillStep(Protocol):
    """A chunk of a prompt in slot 0, of one width. Its last token's logits are wanted."""

    def fill(self, tokens: IntArray, start: int, pending: Sequence[Sequence[int] | None]) -> None:
        """Set what the next run is over: tokens from position `start` on."""

    def run(self) -> None:
        """Run the engine and gather features."""

    def outcomes(self, nodes: Sequence[int]) -> list[Outcome]:
        """Return what was accepted, with nodes [1], once the device has been waited for."""

    @property
    def logits(self) -> Buffer:
        """Logits [1, 1, V]."""


class Steps(Protocol):
    """The steps that a device runs: those of `host_step` or of `bound_step`."""

    fewest_rows: int
    """Rows of a call at least, padding included, if kernels round fewer otherwise (`redraft.runtime.exactness`)."""
    branches: bool
    """True if it takes trees that branch."""
    prefers_chains: bool
    """True if trees that branch take another engine: a method without engines of its own then drafts chains."""

    def tree(self, trees: Sequence[DraftTree], cache_len: Sequence[int], made: DeviceTrees | None) -> TreeStep:
        """The step for such trees, some of which may be `made` on the device."""

    def prefill(self, width: int) -> PrefillStep:
        """The step for chunks of so many tokens."""

    def attach(self, reader: FeatureReader) -> None:
        """Gather features for a reader from now on."""

    def detach(self, reader: FeatureReader) -> None:
        """Stop gathering for a reader."""

    def move(self, source: int, target: int, rows: int) -> None:
        """See `Verifier.move`."""

    def take_branches(self) -> None:
        """See `Verifier.take_branches`."""

    def forget(self) -> None:
        """Drop all steps made so far, with their buffers."""

    def close(self) -> None:
        """The same, and let go of the readers."""


class Verifier:
    """See the module.

    `max_model_len` is the number of rows of a slot, `max_num_seqs` the largest batch, `vocabulary` the number of token
    ids. `ranges` are those of all that works with this verifier, `clock` is theirs. Not for several threads at once.
    """

    def __init__(
        self, device: Device, shape: VerifierShape, max_model_len: int, max_num_seqs: int = 1,
        hidden_states: tuple[str, ...] = (), largest_tree: int = sys.maxsize,
    ) -> None:  # fmt: skip
        """Load the verifier's programs. Raises BundleError, and BackendError if they do not fit the device.

        largest_tree: nodes of a tree that a call takes at most, root included; what `max_model_len` leaves is another
        limit.
        """
        from redraft.runtime.graph_steps import GraphSteps
        from redraft.runtime.host_step import HostSteps

        self.device = device
        self._waits = device.step_graphs
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.vocabulary = shape.vocabulary
        self.block_rows = device.block_rows
        self.clock = Clock()
        self.ranges = Ranges(self.clock)
        self._readers: list[FeatureReader] = []
        kind = GraphSteps if device.step_graphs else HostSteps
        self.largest_tree = largest_tree
        self.steps: Steps = kind(device, shape, hidden_states, Limits(max_num_seqs, max_model_len, largest_tree))
        self._warm = False

    @property
    def fewest_rows(self) -> int:
        """See `Steps.fewest_rows`."""
        return self.steps.fewest_rows

    @fewest_rows.setter
    def fewest_rows(self, rows: int) -> None:
        self.steps.fewest_rows = rows

    @property
    def branches(self) -> bool:
        """True if it takes trees that branch."""
        return self.steps.branches

    @property
    def prefers_chains(self) -> bool:
        """True if trees that branch take another engine: a method without engines of its own then drafts chains."""
        return self.steps.prefers_chains

    def close(self) -> None:
        """Release what holds memory. Nothing else may be asked for afterwards."""
        self.device.wait()
        self._readers.clear()
        self.steps.close()
        self.__dict__.pop("_latest", None)
        self.device.close()

    def attach(self, reader: FeatureReader) -> None:
        """Gather hidden states for `reader` in every call from now on, until `detach`."""
        self.device.wait()
        self._readers.append(reader)
        self._warm = False
        self.steps.attach(reader)

    def detach(self, reader: FeatureReader) -> None:
        """Stop gathering hidden states for `reader`."""
        self.device.wait()
        self._readers.remove(reader)
        self.steps.detach(reader)

    def take_branches(self) -> None:
        """Make ready for trees that branch, if it can. Raises BackendError if memory does not allow it."""
        self.steps.take_branches()

    def warm(self) -> None:
        """Run each shape of a call until no request has to wait for it to be made. Overwrites KV rows: only while no
        request runs. Only an asynchronous device has such shapes.
        """
        if self._warm or not self.device.asynchronous:
            return
        self._warm = True
        for sequences in sorted({1, self.max_num_seqs}, reverse=True):  # the largest first: its memory does for others
            self.warm_trees(sequences)
        for width in range(PREFILL_STEP, min(PREFILL_CHUNK, self.max_model_len) + 1, PREFILL_STEP):
            step = self.steps.prefill(width)
            for _ in range(2):
                step.fill(np.zeros(width, np.int64), 0, [[0]] * len(self._readers))
                step.run()
                self.device.wait()

    def warm_trees(self, sequences: int, made: DeviceTrees | None = None) -> None:
        """Run a step of every width twice, over the trees of a drafter's call if one `made` them."""
        widest = min(self.largest_tree, self.max_model_len)
        for width in [width for width in reversed(names.TREE_WIDTHS) if width <= widest]:
            trees = [made.tree(slot, min(width, made.width)) if made else blank(width) for slot in range(sequences)]
            step = self.steps.tree([blank(width)] * sequences, [0] * sequences, made)
            for _ in range(2):
                step.fill([0] * sequences, trees, [[0] * sequences] * len(self._readers))
                step.run()
                self.device.wait()

    def verify(self, batch: Sequence[Request], trees: Sequence[DraftTree]) -> list[Outcome]:
        """Verify one tree of every sequence in one engine call, and make the rows of accepted paths contiguous.

        Sequence i sits in slot i; cache_len + the largest tree must fit in `max_model_len`. Trees that a drafter left
        on the device stay there. Raises ValueError if two calls of a drafter made them.
        """
        stage = self.ranges.stage
        made = one_source(trees) if self._waits else None
        cache_len = [seq.cache_len for seq in batch]
        pending = [reader.pending(batch, max(map(len, trees))) for reader in self._readers]
        fused = self._waits and _are_greedy(batch)
        with stage("fill"):
            step = self.steps.tree(trees, cache_len, made)
            step.fill(cache_len, trees, pending)
        with stage("verify"), self.ranges.call(names.VERIFIER):
            (step.run if fused else step.verify)()
            if self._waits:
                with stage(WAIT):
                    self.device.wait()
            outcomes = step.outcomes(list(map(len, trees))) if fused else None
        if outcomes is None:
            with stage("accept"):
                outcomes = step.accept(batch, trees)
        if made is not None and self.device.asynchronous:
            self.ranges.waited_for(made.stage, made.work.seconds(), step.seconds(fused))
        return outcomes

    def prefill(self, seq: Request) -> Iterator[tuple[int, int]]:
        """Compute the prompt of `seq` in slot 0, chunk by chunk, in calls of a few widths.

        Yields each chunk's first position and its tokens; `first_outcome` then verifies the prompt's last position.
        """
        prompt = np.array(seq.tokens[: seq.prompt_length], dtype=np.int64)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            width = min(-(-len(chunk) // PREFILL_STEP) * PREFILL_STEP, self.max_model_len - start)
            self._latest = step = self.steps.prefill(width)
            step.fill(chunk, start, [reader.pending([seq], width) for reader in self._readers])
            with self.ranges.stage("prefill"):
                step.run()
            yield start, len(chunk)

    def first_outcome(self, seq: Request) -> Outcome:
        """Return what the verifier says after the prompt that was just computed."""
        self.device.wait()
        if self.device.step_graphs and _are_greedy([seq]):
            return self._latest.outcomes([1])[0]
        logits = logits_of(self._latest)[0]
        return seq.sampler.verify(logits, root_only(seq.tokens[-1]), seq.tokens)

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy at least the first `rows` rows of slot `source` to slot `target`."""
        self.steps.move(source, target, rows)

    def measure_ms(self, sequences: int, nodes: int, kv_len: int) -> float:
        """Time a call over `sequences` chains of `nodes` nodes after `kv_len` rows; overwrites later rows.

        On a device that runs step graphs it is the whole step, its wait included.
        """
        cache_len = min(kv_len, self.max_model_len - max(nodes, 2))  # a graph for one sequence takes a single row twice
        trees = [blank(nodes)] * sequences
        step = self.steps.tree(trees, [cache_len] * sequences, None)
        step.fill([cache_len] * sequences, trees, [[0] * sequences] * len(self._readers))
        work = step.run if self.device.step_graphs else step.verify
        self.device.wait()
        start = time.perf_counter()
        work()
        self.device.wait()
        return (time.perf_counter() - start) * 1e3

    def logits(self, trees: Sequence[DraftTree], cache_lens: Sequence[int]) -> list[FloatArray]:
        """Logits [nodes, V] of one tree a slot, from slot 0 on, after so many rows. Rows of KV are overwritten."""
        step = self.steps.tree(trees, cache_lens, None)
        step.fill(cache_lens, trees, [None] * len(self._readers))
        step.verify()
        self.device.wait()
        return [logits[: len(tree)].copy() for logits, tree in zip(logits_of(step), trees, strict=False)]

    def chunk_logits(self, tokens: IntArray, start: int, width: int) -> FloatArray:
        """Logits [1, V] after part of a prompt, computed as `prefill` does."""
        step = self.steps.prefill(width)
        step.fill(tokens, start, [None] * len(self._readers))
        step.run()
        self.device.wait()
        return logits_of(step)[0, :1].copy()


def open_verifier(
    bundle: Bundle, device: Device, max_num_seqs: int = 1, max_model_len: int | None = None,
    largest_tree: int = sys.maxsize,
) -> Verifier:  # fmt: skip
    """The bundle's verifier on a device, with rows for its context or for `max_model_len` tokens."""
    manifest = bundle.manifest
    rows = max_model_len or manifest.max_model_len
    return Verifier(device, manifest.shape, rows, max_num_seqs, manifest.hidden_states, largest_tree)


def blank(nodes: int) -> DraftTree:
    """A chain of token 0."""
    return chain(np.zeros(nodes, np.int64))


def logits_of(step: TreeStep | PrefillStep) -> FloatArray:
    """Logits [B, R, V] on the host, where they lie or as a copy."""
    buffer = step.logits
    return buffer.host if buffer.host is not None else buffer.read()


def _are_greedy(batch: Sequence[Request]) -> bool:
    """True if the accepting graph says what the samplers would."""
    return all([type(seq.sampler) is Greedy and seq.sampler.logit_margins is None for seq in batch])
