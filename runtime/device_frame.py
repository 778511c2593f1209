"""The buffers of one shape of a step on the device, and the programs bound over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from redraft import names
from redraft.engines.base import Array
from redraft.engines.device import Buffer, Device, Program, Run
from redraft.errors import UsageError
from redraft.names import Dim, Dtype
from redraft.runtime.device_tree import DeviceTrees
from redraft.runtime.tree import layout
from redraft.types import DraftTree, IntArray, Outcome

Programs = Mapping[str, Program]
Collect = Callable[[Mapping[str, Buffer], Buffer], Run]
"""Binds what takes the feature rows [B, T, n] by tap at the path [B, T]."""


class Frame:
    """Buffers for `sequences` sequences of `width` tokens each, `rows` of whose logits are wanted.

    state: the KV buffers of all slots; the first `sequences` are used.
    """

    def __init__(
        self, device: Device, programs: Programs, state: Mapping[str, Buffer], sequences: int, width: int, rows: int,
        given: Mapping[str, Buffer],
    ) -> None:  # fmt: skip
        self.width = width
        self._device = device
        self._programs = programs
        self._sizes = {"B": sequences, "T": width, "R": rows}
        self._buffers = {**{name: leading(buffer, sequences) for name, buffer in state.items()}, **given}
        verifier = programs[names.VERIFIER]
        for spec in (*verifier.inputs, *verifier.outputs):
            if spec.in_place_of is not None:
                self._buffers[spec.name] = self._buffers[spec.in_place_of]
            else:
                self._buffer(spec.name, spec.dtype, spec.shape)
        self.features = {
            spec.name: self._buffers[spec.name] for spec in verifier.outputs if spec.name.startswith(names.features(""))
        }
        self.logits = self._buffers[names.LOGITS]
        self._write(names.OUTPUT_ROWS, np.arange(rows).repeat(sequences).reshape(rows, sequences).T)

    def outcomes(self, nodes: Sequence[int]) -> list[Outcome]:
        """What the verdict says of trees of so many nodes: the step's one copy to the host."""
        verdict = self._buffers[names.VERDICT].read()
        width = (verdict.shape[1] - 1) // 2
        outcomes = []
        for row, count in zip(verdict, nodes, strict=True):
            path = row[1 : 1 + row[0]]
            said = row[1 + width :]
            tokens = tuple(said[path].tolist())
            outcomes.append(Outcome(said[:count].copy(), tuple(path[1:].tolist()), tokens[-1], tokens))
        return outcomes

    def wait(self) -> None:
        """Until all that was started is done."""
        self._buffers[names.VERDICT].read()

    def _buffer(self, name: str, dtype: Dtype, shape: tuple[Dim, ...]) -> Buffer:
        """The buffer of this name, made if there is none."""
        if name not in self._buffers:
            sized = tuple(self._sizes[dim] if isinstance(dim, str) else dim for dim in shape)
            self._buffers[name] = self._device.empty(dtype, *sized)
        return self._buffers[name]

    def _bind(self, program: str, renamed: Mapping[str, Buffer] | None = None) -> Run:
        """A program over the frame's buffers, new ones for outputs that nothing has named yet."""
        loaded = self._programs[program]
        buffers = dict(renamed or {})
        for spec in (*loaded.inputs, *loaded.outputs):
            if spec.name not in buffers:
                buffers[spec.name] = (
                    buffers.get(spec.in_place_of) or self._buffers[spec.in_place_of]
                    if spec.in_place_of
                    else self._buffer(spec.name, spec.dtype, spec.shape)
                )
        return loaded.bind(buffers)

    def _write(self, name: str, values: Array | Sequence[int]) -> None:
        buffer = self._buffers[name]
        buffer.write(np.asarray(values, np.bool_ if buffer.dtype == "bool" else np.int64).reshape(buffer.shape))


class TreeFrame(Frame):
    """A step over trees: of `made`, or of the host's, which `place` writes."""

    def __init__(
        self, device: Device, programs: Programs, state: Mapping[str, Buffer], sequences: int, width: int,
        made: DeviceTrees | None, collect: Collect | None,
    ) -> None:  # fmt: skip
        given = {names.TOKEN_IDS: made.tokens, names.TREE_PARENTS: made.parents} if made else {}
        super().__init__(device, programs, state, sequences, width, width, given)
        self._sizes["1 + 2 T"] = 1 + 2 * width
        runs = [self._bind(names.STEP_LAYOUT), self._bind(names.VERIFIER), self._bind(names.STEP_ACCEPT)]
        after = [self._bind(names.STEP_KEEP)] if width > 1 else []
        if collect is not None:
            after.append(collect(self.features, self._buffers[names.PATH]))
        self.verify = device.chain(runs)
        self._settle = device.chain(after)
        self.step = device.chain([*runs, *after])

    def place(self, trees: Sequence[DraftTree]) -> None:
        """Write the host's trees; nodes that a tree lacks hang from its root, and do not count."""
        tokens, parents = (np.zeros((len(trees), self.width), np.int64) for _ in range(2))
        for slot, tree in enumerate(trees):
            if len(tree) > names.MOST_DEPTH and (deepest := int(layout(tree.parents).depths.max())) > names.MOST_DEPTH:
                raise UsageError(
                    f"a tree of depth {deepest} cannot be verified on a device, at most {names.MOST_DEPTH} can",
                    "lower the budget's depth",
                )
            tokens[slot, : len(tree)] = tree.tokens
            parents[slot, : len(tree)] = tree.parents
        self._write(names.TOKEN_IDS, tokens)
        self._write(names.TREE_PARENTS, parents)

    def start(self, past_len: Sequence[int], nodes: Sequence[int]) -> None:
        """Write the lengths of the sequences and of their trees."""
        self._write(names.PAST_LEN, past_len)
        self._write(names.NODES, nodes)
        self._write(names.LIVE, [max(past_len) + self.width])

    def settle(self, paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the rows of these paths, which the host chose, in place of the verdict's."""
        rows = np.tile(np.arange(self.width), (len(paths), 1))
        for row, path in zip(rows, paths, strict=True):
            row[1 : 1 + len(path)] = path
        self._write(names.PATH, rows)
        self._settle()


class ChunkFrame(Frame):
    """A chunk of a prompt in slot 0, whose last token's logits are wanted."""

    def __init__(
        self, device: Device, programs: Programs, state: Mapping[str, Buffer], width: int, collect: Collect | None
    ) -> None:
        super().__init__(device, programs, state, 1, width, 1, {})
        self._write(names.TREE_MASK, np.tri(width, dtype=np.bool_))
        root = self._root()
        runs = [self._bind(names.VERIFIER), self._bind(names.STEP_ACCEPT, root)]
        if collect is not None:
            every = device.empty("int64", 1, width)
            every.write(np.arange(width)[None])
            runs.append(collect(self.features, every))
        self.step = device.chain(runs)

    def place(self, tokens: IntArray, start: int) -> None:
        """Write the chunk; padding continues the chain, where nothing that counts can see it."""
        padded = np.zeros(self.width, np.int64)
        padded[: len(tokens)] = tokens
        self._write(names.TOKEN_IDS, padded)
        self._write(names.POSITIONS, np.arange(start, start + self.width))
        self._write(names.PAST_LEN, [start])
        self._write(names.LIVE, [start + self.width])
        self._write(names.OUTPUT_ROWS, [len(tokens) - 1])

    def _root(self) -> dict[str, Buffer]:
        """What the accepting graph is given: a tree of the root alone, whose token does not matter."""
        empty = self._device.empty
        root: dict[str, Buffer] = {
            names.TOKEN_IDS: empty("int64", 1, 1), names.TREE_PARENTS: empty("int64", 1, 1),
            names.TREE_MASK: empty("bool", 1, 1, 1), names.NODES: empty("int64", 1), names.PATH: empty("int64", 1, 1),
        }  # fmt: skip
        root[names.TREE_PARENTS].write(np.array([[-1]]))
        root[names.TREE_MASK].write(np.array([[[True]]]))
        root[names.NODES].write(np.array([1]))
        self._buffers[names.VERDICT] = root[names.VERDICT] = empty("int64", 1, 3)
        return root


class SlotMove:
    """Copies what is kept for a sequence from one slot to another."""

    def __init__(self, device: Device, program: str, state: Mapping[str, Buffer]) -> None:
        self._slots = {name: device.empty("int64", 1) for name in (names.SOURCE_SLOT, names.TARGET_SLOT)}
        updated = {names.present(name): buffer for name, buffer in state.items()}
        self._run = device.program(program).bind({**self._slots, **state, **updated})

    def __call__(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        self._slots[names.SOURCE_SLOT].write(np.array([source]))
        self._slots[names.TARGET_SLOT].write(np.array([target]))
        self._run()


def leading(buffer: Buffer, count: int) -> Buffer:
    """The first `count` entries of axis 0, for binding."""
    return buffer.part(count, *buffer.shape[1:])
