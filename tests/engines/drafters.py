"""The drafter of most tests: names of its graphs, and records without files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from redraft import names
from redraft.config import DrafterBuild
from redraft.engines.manifest import DrafterRecord, GraphRecord, Manifest, verifier_digest
from redraft.engines.tensorrt.profiles import CallLimits, drafter_symbols, verifier_symbols
from redraft.methods.base import Sizes
from redraft.methods.lyanna import METHOD, LyannaShape

WEIGHTS = {"model.safetensors": "0" * 64}
LYANNA_DRAFT = names.drafter_graph(METHOD.id, names.DRAFT)
LYANNA_DRAFT_SINGLE = f"{LYANNA_DRAFT}{names.SINGLE}"
LYANNA_RESAMPLE = names.drafter_graph(METHOD.id, names.RESAMPLE)
LYANNA_COPY_SLOT = names.drafter_graph(METHOD.id, names.COPY_SLOT)


def symbols_of(graph: str, limits: CallLimits) -> Mapping[str, Mapping[str, Sizes]]:
    """Sizes by profile of a graph of the verifier, a step or the drafter."""
    role = graph.removeprefix(f"{METHOD.id}.")
    if role in METHOD.graphs:
        return drafter_symbols(METHOD.graphs[role], METHOD.spare_rows, limits)
    return verifier_symbols(graph, limits)


def with_graphs(manifest: Manifest, graphs: Mapping[str, GraphRecord]) -> Manifest:
    """The manifest with these graphs, including those of its drafters."""
    drafters = {
        drafter: replace(
            record,
            graphs={role: graphs.get(names.drafter_graph(drafter, role), one) for role, one in record.graphs.items()},
        )
        for drafter, record in manifest.drafters.items()
    }
    kept = {name: graph for name, graph in graphs.items() if name.partition(".")[0] not in manifest.drafters}
    return replace(manifest, graphs=kept, drafters=drafters)


def lyanna_build(source: str, **options: object) -> DrafterBuild:
    """A drafter in this folder, with its method's id."""
    return DrafterBuild(METHOD.id, source, METHOD.id, options)


def lyanna_record(shape: LyannaShape, file: str = "graph.onnx", **changes: object) -> DrafterRecord:
    """A record whose graphs are all the same file."""
    graphs = {role: GraphRecord(file, *signature) for role, signature in METHOD.signatures(shape).items()}
    values = {
        "method": METHOD.id,
        "verifier_digest": verifier_digest(WEIGHTS),
        "precision": "fp32",
        "hidden_states": METHOD.hidden_states,
        "rows": METHOD.rows,
        "graphs": graphs,
        "state": METHOD.state(shape),
        "limits": METHOD.limits(shape),
        "shape": asdict(shape),
    }
    return DrafterRecord(**{**values, **changes})  # type: ignore[arg-type]
