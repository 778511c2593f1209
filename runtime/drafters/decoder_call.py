"""Calls of a decoder's graph that drafts: runs of a chain as one work, and the levels of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from redraft import names
from redraft.engines.device import Array, Buffer, Device, HostOutputs, Program, slots_of
from redraft.runtime.drafters.candidate_noise import SlotNoise
from redraft.runtime.drafters.growing_tree import GrowingTree
from redraft.runtime.requests.request import Request
from redraft.runtime.steps.bound_step import bound
from redraft.types import FloatArray


class DraftCall:
    """Runs of the graph, one a level, as one work. The first computes `width` rows of each slot, the others one.

    first, later: buffers of the slots' state, factors and tables, for the first run and for others.
    logits: memory for those of each level, [B, R, H]: R rows of a slot get candidates, one if there are several levels.
    """

    def __init__(  # noqa: PLR0913 - the sizes and buffers of one call
        self, device: Device, program: Program, sequences: int, width: int, first: Mapping[str, Buffer],
        later: Mapping[str, Buffer], logits: Sequence[Buffer],
    ) -> None:  # fmt: skip
        self.width = width
        ends = logits[0].shape[1]
        fields: dict[str, tuple[int, ...]] = {names.TOKEN_IDS: (sequences, width), names.DRAWN: (sequences,)}
        for level in range(len(logits)):
            rows = width if level == 0 else 1
            fields |= {
                _at(names.POSITIONS, level): (sequences, rows), _at(names.CACHE_LEN, level): (sequences,),
                _at(names.KV_LEN, level): (1,), _at(names.OUTPUT_ROWS, level): (sequences, ends),
                _at(names.NOISE_KEYS, level): (sequences, ends, 2),
            }  # fmt: skip
        self._host_inputs = device.host_inputs(**fields)
        self._logits = logits
        self._keys = np.ones((sequences, len(logits), 2), np.int64)
        self._chosen: list[tuple[HostOutputs, HostOutputs]] = []
        runs, fetches = [], []
        tokens = self._host_inputs.buffers[names.TOKEN_IDS]
        for level in range(len(logits)):
            given = later if level else first
            known = {**given, names.TOKEN_IDS: tokens, names.LOGITS: self._logits[level]}
            for name in (names.POSITIONS, names.CACHE_LEN, names.KV_LEN, names.OUTPUT_ROWS, names.NOISE_KEYS):
                known[name] = self._host_inputs.buffers[_at(name, level)]
            known[names.DRAWN] = self._host_inputs.buffers[names.DRAWN]
            rows = width if level == 0 else 1
            runs.append(bound(device, program, known, {"B": sequences, "T": rows, "R": ends}))
            self._mask = known[names.TREE_MASK]
            self._mask.write(np.tile(np.tri(rows, dtype=np.bool_), (sequences, 1, 1)))
            outputs = [device.host_outputs(known[name]) for name in (names.CANDIDATES, names.CANDIDATE_LOG_PROBS)]
            self._chosen.append((outputs[0], outputs[1]))
            fetches += [output.fetch for output in outputs]
            tokens = known[names.CANDIDATES].part(sequences, 1)
        self.work = device.chain([self._host_inputs.send, *runs, *fetches])

    def fill(self, starts: Sequence[int], pending: Sequence[Sequence[int]], positions: Array) -> None:
        """Set the next run's rows: pending tokens after the first rows of each slot. A slot may have none."""
        values, levels = self._host_inputs.open(), len(self._chosen)
        tokens = values[names.TOKEN_IDS]
        for slot, (start, rows) in enumerate(zip(starts, pending, strict=True)):
            tokens[slot, : len(rows)] = rows
            tokens[slot, len(rows) :] = 0
            values[_at(names.POSITIONS, 0)][slot] = positions[start : start + self.width]
            values[_at(names.CACHE_LEN, 0)][slot] = start
            values[_at(names.OUTPUT_ROWS, 0)][slot] = max(len(rows) - 1, 0)
            row = start + max(len(rows), 1)
            for level in range(1, levels):
                values[_at(names.POSITIONS, level)][slot] = positions[row]
                values[_at(names.CACHE_LEN, level)][slot] = row
                row += 1
        for level in range(levels):
            rows_of = self.width if level == 0 else 1
            values[_at(names.KV_LEN, level)][0] = values[_at(names.CACHE_LEN, level)].max() + rows_of

    def fill_tree(self, starts: Sequence[int], trees: Sequence[GrowingTree | None]) -> None:
        """Set the next run's rows: the expanded nodes of each slot's tree, after its first rows."""
        values = self._host_inputs.open()
        mask = np.tile(np.eye(self.width, dtype=np.bool_), (len(starts), 1, 1))
        for name in (names.TOKEN_IDS, _at(names.OUTPUT_ROWS, 0)):
            values[name][...] = 0
        for slot, (start, tree) in enumerate(zip(starts, trees, strict=True)):
            values[_at(names.POSITIONS, 0)][slot] = start
            values[_at(names.CACHE_LEN, 0)][slot] = start
            if tree is not None and (rows := len(tree.rows)):
                values[names.TOKEN_IDS][slot, :rows] = [tree.tokens[node] for node in tree.rows]
                values[_at(names.POSITIONS, 0)][slot, :rows] = [start - 1 + tree.depths[node] for node in tree.rows]
                values[_at(names.OUTPUT_ROWS, 0)][slot, : len(tree.ends)] = range(rows - len(tree.ends), rows)
                mask[slot, :rows, :rows] = tree.mask()
        values[_at(names.KV_LEN, 0)][0] = max(starts) + self.width
        self._mask.write(mask)

    def sample(self, noise: SlotNoise, slots: range, batch: Sequence[Request], first: int) -> None:
        """Set the noise of the next run over these slots, whose first level is level `first` of its draft."""
        values = self._host_inputs.open()
        noise.set(batch, {names.NOISE_KEYS: self._keys, names.DRAWN: values[names.DRAWN]}, slots.start, first)
        for level in range(self._keys.shape[1]):
            values[_at(names.NOISE_KEYS, level)][...] = self._keys[:, level, None]

    def candidate(self, slot: int, level: int) -> tuple[int, float]:
        """Return the best token of a level and its log probability, after a wait for the device."""
        tokens, log_probs = self._chosen[level]
        return int(tokens.values[slot, 0, 0]), float(log_probs.values[slot, 0, 0])

    def candidates(self, slot: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log probabilities of the candidates of each of a slot's R rows, [R][k]."""
        tokens, log_probs = self._chosen[0]
        return tokens.values[slot].tolist(), log_probs.values[slot].tolist()

    def logits(self, slot: int, level: int) -> FloatArray:
        """Return a copy of a level's logits after its first row with candidates, [H]."""
        buffer = slots_of(self._logits[level], range(slot, slot + 1))
        read: FloatArray = buffer.read()[0, 0].copy()
        return read


def _at(name: str, level: int) -> str:
    """Return the name of the host input of a level."""
    return f"{name}.{level}"
