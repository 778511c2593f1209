"""The device buffers of one shape of a step, and the programs that use them."""

# pylint: disable=too-many-lines  # the buffers of a step and the programs over them
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from redraft import names
from redraft.engines.device import Buffer, Device, Program, Run, Work, sized, slots_of
from redraft.engines.host_device import array_of
from redraft.errors import UsageError
from redraft.names import Dim, Dtype
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.sampler import OverTokens, accept, at_token
from redraft.runtime.sampling.truncation import no_numbers
from redraft.runtime.steps.interface import FeatureReader, Pending
from redraft.runtime.trees.device_tree import DeviceTree, TreeStore
from redraft.types import NOT_REACHED, FloatArray, IntArray, Outcome, Tree

KV_RANK = 4
"""Rank of the buffers [B, H, C, D], whose rows are in axis 2."""


class StepBuffers:
    """The shared parts of a verifier's steps: programs, KV buffers, drafted trees, and memory for one call's values.

    Calls never run at the same time, so they share the memory of the largest one's logits and features.
    """

    def __init__(
        self,
        device: Device,
        programs: dict[str, Program],
        state: Mapping[str, Buffer],
        store: TreeStore,
        readers: list[FeatureReader],
    ) -> None:
        self.device = device
        self.programs = programs
        self.state = state
        self.store = store
        self.readers = readers
        self._largest: dict[str, Buffer] = {}

    def program(self, name: str) -> Program:
        """Return a program, which is loaded on first use."""
        if name not in self.programs:
            self.programs[name] = self.device.program(name)
        return self.programs[name]

    def buffer(self, name: str, dtype: Dtype, shape: tuple[int, ...]) -> Buffer:
        """Return memory that steps share."""
        try:
            return self._largest[name].part(*shape)
        except (KeyError, ValueError):
            self._largest[name] = self.device.empty(dtype, *shape)
            return self._largest[name]


class BoundStep:
    """Buffers for the sequences (B) in `slots`, with `width` tokens each (T) and logits of `rows` of them (R: 1 or T).

    fields: shapes of the host's inputs except lengths.   given: buffers of other owners.
    """

    def __init__(
        self, buffers: StepBuffers, slots: range, width: int, rows: int, fields: Mapping[str, tuple[int, ...]],
        given: Mapping[str, Buffer],
    ) -> None:  # fmt: skip
        self.width = width
        self._shared = buffers
        self._slots = slots
        sequences = len(slots)
        self._sizes = {"B": sequences, "T": width, "R": rows, "1 + 2 T": 1 + 2 * rows}
        self._temperatures: list[float] = []
        several = (sequences,)
        offsets = {_offset(place): several for place in range(len(buffers.readers))}
        self.host_inputs = buffers.device.host_inputs(**{
            names.CACHE_LEN: several, names.KV_LEN: (1,), names.OUTPUT_ROWS: (sequences, rows), **offsets, **fields,
        })  # fmt: skip
        self._values = self.host_inputs.open()
        self._offsets = [self._values[name] for name in offsets]
        state = {name: slots_of(buffer, slots) for name, buffer in buffers.state.items()}
        self._buffers: dict[str, Buffer] = {**state, **self.host_inputs.buffers, **given}
        verifier = buffers.programs[names.VERIFIER]
        for spec in (*verifier.inputs, *verifier.outputs):
            if spec.in_place_of is not None:
                self._buffers[spec.name] = self._buffers[spec.in_place_of]
            elif spec in verifier.outputs:
                self._buffers[spec.name] = buffers.buffer(spec.name, spec.dtype, sized(spec.shape, self._sizes))
        self.features = {
            spec.name: self._buffers[spec.name]
            for spec in verifier.outputs
            if spec.name.startswith(names.hidden_states(""))
        }
        self.logits = self._buffers[names.LOGITS]

    def _accepted(self, batch: Sequence[Request], nodes: Iterable[int]) -> list[Outcome]:
        """Return the outcomes in accept_output for trees of these sizes. Call it after waiting for the device.

        If an accepted row of logits has no largest number, the outcome has an error.
        """
        accept_output = self._accept_output.values
        first = (accept_output.shape[1] + 1) // 2
        outcomes = []
        for seq, row, count in zip(batch, accept_output.tolist(), nodes, strict=True):
            targets, accepted = row[first : first + count], row[0]
            path = tuple(row[2 : 1 + accepted])
            tokens = (targets[0], *[targets[node] for node in path]) if path else (targets[0],)
            outcome = Outcome(targets, path, tokens[-1], tokens)
            if tokens[-1] == NOT_REACHED:
                number = len(seq.tokens) - seq.prompt_length + len(tokens)
                outcome = outcome._replace(tokens=tokens[:-1], error=at_token(number, no_numbers()))
            outcomes.append(outcome)
        return outcomes

    def _bind_accepting(self, over: Mapping[str, Buffer]) -> Run:
        """Return the run of the accepting graph. Its output can then be copied to the host."""
        run = self._bind(names.STEP_ACCEPT, over)
        self._accept_output = self._shared.device.host_outputs(
            over.get(names.ACCEPT_OUTPUT) or self._buffers[names.ACCEPT_OUTPUT]
        )
        return run

    def _bind_sampling(self, over: Mapping[str, Buffer]) -> Run:
        """Return the run of the accepting graph that samples, into the output of the other one."""
        run = self._bind(names.STEP_ACCEPT_SAMPLED, over)
        self._temperatures = []
        return run

    def _set_temperatures(self, batch: Sequence[Request]) -> None:
        """Set the temperatures of the accepting graph that samples. They are written when they change."""
        temperatures = [seq.sampler.device_temperature or 0.0 for seq in batch]
        if temperatures != self._temperatures:
            self._temperatures = temperatures
            self._buffers[names.TEMPERATURE].write(np.array(temperatures, np.float32))

    def _host_logits(self) -> FloatArray:
        """Return a copy of the logits [B, R, V]."""
        return self.logits.read()

    def _gathering(self, path: Buffer) -> list[Run]:
        """Return copies of the feature rows at `path` [B, T] to each reader's pending rows."""
        runs = []
        rows = path.shape[1]
        for place, reader in enumerate(self._shared.readers):
            for state, pending in reader.pending_features(self._slots).items():
                if rows > (most := pending.shape[1] - names.CATCH_UP_ROWS):
                    raise UsageError(
                        f"a tree of {rows} nodes is too large, at most {most} can be", "lower the budget's nodes"
                    )
                features = self.features[names.hidden_states(state)]
                offset = self._buffers[_offset(place)]
                runs.append(gathered(self._shared.program(names.STEP_GATHER_FEATURES), features, path, pending, offset))
        return runs

    def _set_offsets(self, pending: Pending) -> None:
        """Set the position of each reader's gathered rows. Rows without a reader go to the front."""
        for of_reader, offsets in zip(self._offsets, pending, strict=True):
            for place in range(len(of_reader)):  # one by one is faster than from a list
                of_reader[place] = offsets[place] if offsets is not None else 0

    def _bind(self, program: str, over: Mapping[str, Buffer] | None = None) -> Run:
        """Bind a program to the step's buffers and those in `over`. It creates buffers for other names."""
        loaded = self._shared.program(program)
        buffers = dict(over or {})
        for spec in (*loaded.inputs, *loaded.outputs):
            if spec.name not in buffers:
                buffers[spec.name] = self._buffer(spec.in_place_of or spec.name, spec.dtype, spec.shape)
        return loaded.bind({spec.name: buffers[spec.name] for spec in (*loaded.inputs, *loaded.outputs)})

    def _buffer(self, name: str, dtype: Dtype, shape: tuple[Dim, ...]) -> Buffer:
        """Return the buffer of this name, created on first use."""
        if name not in self._buffers:
            self._buffers[name] = self._shared.device.empty(dtype, *sized(shape, self._sizes))
        return self._buffers[name]


class BoundTreeStep(BoundStep):
    """A step over trees of `width` nodes in the first slots. Each tree is in the host's inputs or in the store."""

    def __init__(self, buffers: StepBuffers, sequences: int, width: int) -> None:
        tree, several = (sequences, width), (sequences,)
        fields = {
            names.NODES: several, names.ON_DEVICE: several, names.HOST_TOKENS: tree, names.HOST_PARENTS: tree,
            names.NOISE_KEYS: (*tree, 2),
        }  # fmt: skip
        tokens, parents = buffers.store.of(sequences)
        given = {names.STORED_TOKENS: tokens, names.STORED_PARENTS: parents}
        super().__init__(buffers, range(sequences), width, width, fields, given)
        self._values[names.OUTPUT_ROWS][:] = np.arange(width)
        self._fields = [self._values[name] for name in (names.CACHE_LEN, names.NODES, names.ON_DEVICE, names.KV_LEN)]
        self._rows = list(zip(self._values[names.HOST_TOKENS], self._values[names.HOST_PARENTS], strict=True))
        self._first = [self.host_inputs.send, self._bind(names.STEP_PREPARE_TREE), self._bind(names.VERIFIER)]
        accept = self._bind_accepting({})
        self._after = [self._bind(names.STEP_COMPACT_KV)] if width > 1 else []
        self._after += self._gathering(self._buffers[names.PATH])
        self._greedy = self._accepting(accept)
        self._sampled: tuple[Work, Work] | None = None
        self._settle = buffers.device.chain(self._after)
        self._latest = self._whole = self._greedy[0]

    def _accepting(self, accept: Run) -> tuple[Work, Work]:
        """Return all five parts as one run, and the first three, with this run of an accepting graph."""
        chain, runs = self._shared.device.chain, [*self._first, accept, self._accept_output.fetch]
        return chain([*runs, *self._after]), chain(runs)

    def fill(
        self, cache_len: Sequence[int], trees: Sequence[Tree], pending: Pending, batch: Sequence[Request] = ()
    ) -> None:
        values = self.host_inputs.open()
        self._next = self._greedy
        if any([seq.sampler.device_temperature for seq in batch]):
            if self._sampled is None:
                self._sampled = self._accepting(self._bind_sampling({}))
            self._next = self._sampled
            self._set_temperatures(batch)
            for keys, seq, tree in zip(values[names.NOISE_KEYS], batch, trees, strict=True):
                if seq.sampler.device_temperature:  # no node is deeper than there are nodes
                    keys[: len(tree)] = seq.noise.keys(len(seq.tokens), len(tree))
        lengths, counts, on_device, kv_len = self._fields
        kv_len[0] = max(cache_len) + self.width
        for slot, tree in enumerate(trees):  # one by one is faster than from a list for the few trees of a batch
            lengths[slot] = cache_len[slot]
            counts[slot] = len(tree)
            on_device[slot] = tree.on_device
            if not isinstance(tree, DeviceTree):
                place(tree, *self._rows[slot])
            elif tree.slot != slot:
                raise ValueError(f"the tree of sequence {slot} was drafted for slot {tree.slot}")
        self._set_offsets(pending)

    def run(self, whole: bool) -> None:
        """Run all five parts as one, or the first three."""
        self._whole, verify = self._next
        self._latest = self._whole if whole else verify
        self._latest()

    def seconds(self) -> float:
        return self._latest.seconds()

    def tree_logits(self, trees: Sequence[Tree]) -> list[FloatArray]:
        logits = self.logits.read()
        return [rows[: len(tree)] for rows, tree in zip(logits, trees, strict=True)]

    def outcomes(self, batch: Sequence[Request], trees: Sequence[Tree]) -> list[Outcome]:
        """Return the outcomes. After a run of the first parts, the samplers choose the tokens here.

        Only samplers that need logits cause a copy of them.
        """
        accepted = self._accepted(batch, map(len, trees))
        return accepted if self._latest is self._whole else self._settled(accepted, batch, trees)

    def _settled(self, accepted: Sequence[Outcome], batch: Sequence[Request], trees: Sequence[Tree]) -> list[Outcome]:
        """Let the samplers choose, then compact the rows of the accepted paths and gather their features."""
        target_token_ids = [outcome.target_token_ids for outcome in accepted]
        outcomes, logits = [], None
        for slot, (seq, tree) in enumerate(zip(batch, trees, strict=True)):
            if seq.sampler.device_temperature is not None:
                outcomes.append(accepted[slot])
            elif isinstance(seq.sampler, OverTokens):
                outcomes.append(accept(tree, seq.sampler.sample_likeliest(target_token_ids[slot], tree, seq.tokens)))
            else:
                logits = self._host_logits() if logits is None else logits
                outcomes.append(seq.verify(logits[slot, : len(tree)], tree))
        rows = np.tile(np.arange(self.width), (len(outcomes), 1))
        for row, outcome in zip(rows, outcomes, strict=True):
            row[1 : 1 + len(outcome.path)] = outcome.path
        self._buffers[names.PATH].write(rows)
        self._settle()
        return outcomes


def place(tree: Tree, tokens: IntArray, parents: IntArray) -> None:
    """Write a host tree to its inputs, [T] each. Padding nodes are children of the root, and do not count."""
    count = len(tree)
    if count == 1:  # plain decoding; writing one entry is faster
        tokens[0], parents[0] = tree.tokens[0], -1
    else:
        tokens[:count] = tree.tokens
        parents[:count] = tree.parents
    if count < len(tokens):
        tokens[count:] = 0
        parents[count:] = 0


class BoundPrefill(BoundStep):
    """A chunk of a prompt in one slot. It computes the logits of the chunk's last token."""

    def __init__(self, buffers: StepBuffers, width: int, slot: int) -> None:
        chunk = (1, width)
        fields = {names.TOKEN_IDS: chunk, names.POSITIONS: chunk}
        super().__init__(buffers, range(slot, slot + 1), width, 1, fields, {})
        device = buffers.device
        verifier = self._bind(names.VERIFIER)
        self._buffers[names.TREE_MASK].write(np.tri(width, dtype=np.bool_)[None])
        runs = [self.host_inputs.send, verifier]
        if buffers.readers:
            path = device.empty("int64", 1, width)
            path.write(np.arange(width)[None])
            runs += self._gathering(path)
        self.run = device.chain(runs)

    def fill(self, tokens: IntArray, start: int, pending: Pending) -> None:
        """Set the inputs of the next run. Padding continues the chain."""
        values, count = self.host_inputs.open(), len(tokens)
        values[names.TOKEN_IDS][0, :count] = tokens
        values[names.TOKEN_IDS][0, count:] = 0
        values[names.POSITIONS][0] = np.arange(start, start + self.width)
        values[names.CACHE_LEN][0] = start
        values[names.KV_LEN][0] = start + self.width
        values[names.OUTPUT_ROWS][0, 0] = count - 1
        self._set_offsets(pending)


def slot_copy(device: Device, program: str, state: Mapping[str, Buffer]) -> Callable[[int, int, int], None]:
    """Return a function of source, target and rows that copies a sequence's state from one slot to another.

    On the host it copies the given number of KV rows, on other devices all rows.
    """
    if not device.step_graphs:
        arrays = [array_of(buffer) for buffer in state.values()]

        def copy_rows(source: int, target: int, rows: int) -> None:
            for array in arrays:
                valid = (slice(None), slice(rows)) if array.ndim == KV_RANK else ()
                array[(target, *valid)] = array[(source, *valid)]

        return copy_rows
    host_inputs = device.host_inputs(**{names.SOURCE_SLOT: (1,), names.TARGET_SLOT: (1,)})
    updated = {names.present(name): buffer for name, buffer in state.items()}
    run = device.program(program).bind({**host_inputs.buffers, **state, **updated})

    def copy(source: int, target: int, rows: int) -> None:
        values = host_inputs.open()
        values[names.SOURCE_SLOT][0] = source
        values[names.TARGET_SLOT][0] = target
        host_inputs.send()
        run()

    return copy


def bound(device: Device, program: Program, known: dict[str, Buffer], sizes: Mapping[str, int]) -> Run:
    """Bind a program to the buffers in `known`, to which it adds those that it creates."""
    specs = (*program.inputs, *program.outputs)
    for spec in specs:
        if spec.name not in known:
            updated = known.get(spec.in_place_of) if spec.in_place_of else None
            known[spec.name] = updated or device.empty(spec.dtype, *sized(spec.shape, sizes))
    return program.bind({spec.name: known[spec.name] for spec in specs})


def gathered(program: Program, features: Buffer, path: Buffer, pending: Buffer, start: Buffer) -> Run:
    """Return a copy of features[b, path[b, i]] to pending[b, start[b] + i]."""
    return program.bind({
        names.FEATURE_ROWS: features, names.PATH: path, names.PENDING_FEATURES: pending, names.PENDING_OFFSET: start,
        names.present(names.PENDING_FEATURES): pending,
    })  # fmt: skip


def _offset(reader: int) -> str:
    """Return the name of the host input with the first pending row of a reader."""
    return f"{names.PENDING_OFFSET}.{reader}"
