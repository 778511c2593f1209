"""Writes a drafter into its verifier's bundle: graphs, weights, tables, and their record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.assembly.drafters import OpenedDrafter
from redraft.engines.manifest import DrafterRecord, GraphRecord
from redraft.errors import UnsupportedModelError, UsageError
from redraft.export.drafters import graph_file
from redraft.names import COPY_SLOT, batch, drafter_graph, operators, single

if TYPE_CHECKING:
    from redraft.export.verifier import VerifierExport

_ONNX_TYPES = {"float32": "float"}
"""ONNX's names of element types that differ from redraft's."""


def write_drafter(
    drafter: OpenedDrafter, verifier: VerifierExport, digest: str, folder: Path, report: Callable[[str], None]
) -> DrafterRecord:
    """Write a drafter's graphs and tables into the verifier's `folder`. Returns its record.

    digest: the verifier's. Raises CheckpointError if weights do not fit, and UsageError for an id that the verifier's
    files use.
    """

    def progress(stage: str, done: int, total: int) -> None:
        report(f"{stage} {done}/{total}" if total > 1 else stage)

    taken = any(ref.initializer.startswith(f"{drafter.id}.") for ref in verifier.weights)
    if taken or any(path.name.partition(".")[0] == drafter.id for path in (folder / "weights").glob("*")):
        raise UsageError(f"the verifier has weights called {drafter.id!r}", "give the drafter another id")
    if drafter.description:
        report(f"drafter {drafter.id}: {drafter.description}")
    exported = drafter.export(verifier, folder, progress)
    method, shape = drafter.method, exported.shape
    return DrafterRecord(
        method=method.id,
        verifier_digest=digest,
        precision=exported.precision,
        hidden_states=method.states_of(shape),
        rows=method.rows,
        graphs=_graphs(drafter, shape, folder),
        state=method.state(shape),
        limits=method.limits(shape),
        shape=asdict(shape),
        weights=exported.weights,
        tables=exported.tables,
    )


def _graphs(drafter: OpenedDrafter, shape: Any, folder: Path) -> dict[str, GraphRecord]:
    """Check the exported graphs, and write the one that copies a slot and those for the CPU. Returns all by role."""
    from redraft.engines.lowering import (
        lower_any,
        lower_batch,
        lower_chain,
        lower_drafter_operators,
        lower_single,
    )
    from redraft.export.graph.step_graphs import export_slot_copy

    method, state = drafter.method, drafter.method.state(shape)
    if state:
        export_slot_copy(drafter_graph(drafter.id, COPY_SLOT), state, folder)
    graphs = {}
    for role, (inputs, outputs) in method.signatures(shape).items():
        graphs[role] = GraphRecord(graph_file(drafter.id, role), inputs, outputs)
        check_graph(folder, graphs[role], f"drafter {drafter.id}: graph {role!r} of method {method.id}")
    on_cpu = all(spec.dtype == "float32" for spec in state)
    for role in method.roles(shape):
        graph, portable = method.graphs[role], graphs[role]
        for_batches, for_one = (drafter_graph(drafter.id, form(role)) for form in (batch, single))
        one = None
        if graph.decoder and on_cpu:
            several = lower_batch(folder, portable, for_batches)
            one = lower_single(folder, portable, False, for_one, chains=method.limits(shape).width == 1)
        else:
            several = lower_any(folder, portable, for_batches)
            if graph.chain_steps and graph.one_way(shape) and on_cpu:
                one = lower_chain(folder, portable, for_one)
        own = None
        if on_cpu and (graph.decoder or graph.chain_steps):
            own = lower_drafter_operators(
                folder, portable, drafter_graph(drafter.id, operators(role)), not graph.decoder
            )
        forms = ((batch, several), (single, one), (operators, own))
        graphs |= {form(role): lowered for form, lowered in forms if lowered}
    return graphs


def check_graph(folder: Path, record: GraphRecord, what: str) -> None:
    """Raise UnsupportedModelError if the file of a graph is missing or does not fit the specification's signature."""
    import onnx

    path = folder / record.file
    if not path.is_file():
        raise UnsupportedModelError(f"{what}: expected the file {record.file}, found none")
    graph = onnx.load(path, load_external_data=False).graph
    for kind, values, specs in (("input", graph.input, record.inputs), ("output", graph.output, record.outputs)):
        found = {value.name: value.type.tensor_type for value in values}
        if set(found) != {spec.name for spec in specs}:
            names = ", ".join(sorted(set(found) ^ {spec.name for spec in specs}))
            raise UnsupportedModelError(f"{what} does not fit its signature: {kind} {names} missing or unknown")
        for spec in specs:
            dtype = onnx.helper.tensor_dtype_to_string(found[spec.name].elem_type)
            sizes = [dim.dim_value for dim in found[spec.name].shape.dim]
            fits = len(sizes) == len(spec.shape) and all(
                size in (0, wanted) for size, wanted in zip(sizes, spec.shape, strict=True) if isinstance(wanted, int)
            )
            if not fits or dtype.removeprefix("TensorProto.").lower() != _ONNX_TYPES.get(spec.dtype, spec.dtype):
                raise UnsupportedModelError(
                    f"{what} does not fit its signature: expected {kind} {spec.name} {spec.dtype}{list(spec.shape)}, "
                    f"found {dtype.removeprefix('TensorProto.')}{sizes}"
                )
