"""Programs of a step that the host runs as NumPy functions instead of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redraft import names
from redraft.engines.device import Array, Buffer, Program, Run, check_bindings
from redraft.engines.host_buffer import array_of
from redraft.engines.manifest import GraphRecord

Arrays = Mapping[str, Array]


def host_program(graph: str, record: GraphRecord) -> Program | None:
    """Return the function that replaces this graph, or None."""
    if graph == names.STEP_GATHER_FEATURES:
        return HostProgram(record, gather_features)
    return None


class HostProgram:
    """A `redraft.engines.device.Program` of a function over arrays, which updates some of them."""

    def __init__(self, record: GraphRecord, function: Callable[[Arrays], None]) -> None:
        self.inputs = record.inputs
        self.outputs = record.outputs
        self._function = function

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        """Return a run over these buffers. Raises ValueError if one does not fit."""
        check_bindings((*self.inputs, *self.outputs), buffers)
        arrays = {spec.name: array_of(buffers[spec.name]) for spec in self.inputs}
        function = self._function

        def run() -> None:
            function(arrays)

        return run


def gather_features(arrays: Arrays) -> None:
    """Copy row path[b, i] of features[b] to row pending_offset[b] + i of pending_features[b]."""
    features, pending = arrays[names.FEATURE_ROWS], arrays[names.PENDING_FEATURES]
    for slot, (rows, start) in enumerate(zip(arrays[names.PATH], arrays[names.PENDING_OFFSET].tolist(), strict=True)):
        pending[slot, start : start + len(rows)] = features[slot, rows]
