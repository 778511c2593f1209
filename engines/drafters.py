"""The drafters of a bundle: the manifest's records with their methods' specifications."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from redraft import names
from redraft.engines.manifest import DrafterRecord, Manifest
from redraft.methods import GraphSpec, Method, find_method
from redraft.names import TensorSpec
from redraft.signatures import Signature


@dataclass(frozen=True)
class BuiltDrafter:
    """A drafter with its method and the shape that the method reads from the record."""

    id: str
    record: DrafterRecord
    method: Method[Any]
    shape: Any

    def graph(self, role: str) -> str:
        """Return the bundle's name of the graph with this role."""
        return names.drafter_graph(self.id, role)

    @property
    def engine_graphs(self) -> dict[str, GraphSpec[Any]]:
        """Return the drafting graphs by name, without slot copies and CPU graphs."""
        return {self.graph(role): self.method.graphs[role] for role in self.method.roles(self.shape)}


def read_drafter(drafter: str, record: DrafterRecord) -> BuiltDrafter:
    """Return the drafter of a record. Raises UsageError for an unknown method or an invalid shape."""
    method = find_method(record.method)
    return BuiltDrafter(drafter, record, method, method.parse_shape(record.shape))


def read_drafters(manifest: Manifest) -> tuple[BuiltDrafter, ...]:
    """Return all drafters of a bundle, in its order. Raises UsageError like `read_drafter`."""
    return tuple(read_drafter(drafter, record) for drafter, record in manifest.drafters.items())


def drafter_of(manifest: Manifest, graph: str) -> BuiltDrafter | None:
    """Return the drafter that has a graph, or None for graphs of the verifier and of a step."""
    drafter, _, _ = graph.partition(".")
    record = manifest.drafters.get(drafter)
    return read_drafter(drafter, record) if record else None


def measured_graphs(manifest: Manifest) -> tuple[str, ...]:
    """Return the verifier's graph and the drafters' drafting graphs, for commands of other tools."""
    return (names.VERIFIER, *(name for drafter in read_drafters(manifest) for name in drafter.engine_graphs))


def drafter_signatures(drafter: BuiltDrafter) -> dict[str, Signature]:
    """Return the required inputs and outputs of a drafter's graphs by role."""
    found = drafter.method.signatures(drafter.shape)
    for role, graph in drafter.method.graphs.items():
        if (batch := names.batch(role)) in drafter.record.graphs:
            found[batch] = found[role]
        single, operators = names.single(role), names.operators(role)
        if graph.chain_steps or graph.decoder:
            inputs, outputs = found[role]
            outputs = chain_outputs(outputs, graph.chain_steps(drafter.shape) if graph.chain_steps else 1)
            if single in drafter.record.graphs:
                found[single] = single_sequence(inputs), single_sequence(outputs)
            if operators in drafter.record.graphs:
                found[operators] = inputs, outputs
    return found


def drafter_problems(drafter: BuiltDrafter, manifest: Manifest, verifier: str) -> Iterator[str]:
    """Yield the problems of a drafter's record, except graphs and tables. verifier: digest of its weights."""
    record, method = drafter.record, drafter.method
    if record.verifier_digest != verifier:
        found, expected = record.verifier_digest[:12], verifier[:12]
        yield f"drafter {drafter.id} belongs to another verifier: expected {expected}, found {found}"
    for what, expected_here, found_here in (
        ("hidden states", method.states_of(drafter.shape), record.hidden_states),
        ("rows", method.rows, record.rows),
        ("limits", method.limits(drafter.shape), record.limits),
        ("state", method.state(drafter.shape), record.state),
    ):
        if expected_here != found_here:
            yield f"drafter {drafter.id}: expected {what} {expected_here}, found {found_here}"
    if missing := sorted(set(record.hidden_states) - set(manifest.hidden_states)):
        yield f"drafter {drafter.id} reads hidden states {', '.join(missing)}, which the verifier does not output"


def single_sequence(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the same tensors with the symbol B fixed to 1."""
    return tuple(replace(spec, shape=tuple(1 if dim == "B" else dim for dim in spec.shape)) for spec in specs)


def chain_outputs(outputs: tuple[TensorSpec, ...], steps: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a chain. Each step but the last updates the buffers by another name."""
    updates = [spec for spec in outputs if spec.in_place_of]
    return (*outputs, *(replace(spec, name=f"{spec.name}.{step}") for step in range(steps - 1) for spec in updates))
