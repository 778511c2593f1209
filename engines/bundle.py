"""Open an engine bundle. It fails closed: errors name what was expected, what was found, and a command to fix it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft import names, signatures
from redraft.config import DRAFTER_ID, RESERVED_IDS
from redraft.engines.check_record import CheckRecord
from redraft.engines.digests import file_digests
from redraft.engines.drafters import (
    BuiltDrafter,
    drafter_problems,
    drafter_signatures,
    read_drafter,
    single_sequence,
)
from redraft.engines.host_memory import huge_pages
from redraft.engines.manifest import GraphRecord, Manifest, load_manifest, rebuild_command, verifier_digest
from redraft.engines.writer import BundleWriter
from redraft.errors import BundleError, UsageError
from redraft.names import TensorSpec, WeightRef

_ENTRY = re.compile(rb"\x0a.(location|offset|length)\x12(.)([\w./-]+)", re.DOTALL)
"""Protobuf's form of an entry of a tensor's `external_data`: field 1, the key; field 2, its size, a name or digits."""
_DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8, "I64": np.int64}

VERIFIERS = (
    names.VERIFIER, names.VERIFIER_BATCH, names.VERIFIER_SINGLE, names.VERIFIER_FAST, names.VERIFIER_OPERATORS,
)  # fmt: skip
"""The forms of the verifier's graph. Every bundle has the first one."""

__all__ = ["Bundle", "BundleWriter", "open_bundle", "verifier_signature"]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read and whose files have been checked."""

    path: Path
    manifest: Manifest

    def graph(self, name: str) -> GraphRecord:
        """The record of graph `name`. Raises BundleError if the bundle has none."""
        record = self.manifest.all_graphs.get(name)
        if record is None:
            raise self.error(f"expected a graph {name!r}, found {', '.join(sorted(self.manifest.all_graphs))}")
        return record

    def host_graph(self, single: bool, exact: bool = True, operators: bool = False) -> str:
        """The verifier's graph that the CPU runs, for one sequence at once or for any number.

        One for chains only has no mask.   operators: True if the process has redraft's operators.
        """
        if operators and names.VERIFIER_OPERATORS in self.manifest.graphs:
            return names.VERIFIER_OPERATORS
        one = names.VERIFIER_SINGLE if exact else names.VERIFIER_FAST
        wanted = (*((one,) if single else ()), names.VERIFIER_BATCH)
        return next((name for name in wanted if name in self.manifest.graphs), names.VERIFIER)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the verifier's tensor that the manifest lists as `name`, read into memory."""
        ref = next((ref for ref in self.manifest.weights if ref.initializer == name), None)
        if ref is None:
            raise self.error(f"expected a tensor {name!r}, found none")
        return self._array(ref)

    def drafter(self, drafter: str) -> BuiltDrafter:
        """Return the drafter with this id. Raises BundleError if the bundle has none."""
        record = self.manifest.drafters.get(drafter)
        if record is None:
            raise self.error(f"expected a drafter {drafter!r}, found {', '.join(self.manifest.drafters) or 'none'}")
        return read_drafter(drafter, record)

    def tables(self, drafter: str) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Return the tables of a drafter by name, read into memory."""
        return {ref.initializer: self._array(ref) for ref in self.drafter(drafter).record.tables}

    def _array(self, ref: WeightRef) -> np.ndarray[Any, np.dtype[Any]]:
        with huge_pages():
            values = np.fromfile(self.path / ref.file, _DTYPES[ref.dtype], math.prod(ref.shape), offset=ref.offset)
        return values.reshape(ref.shape)

    def graph_bytes(self, graph: str) -> int:
        """Return the bytes of a graph's file and its external weights. Tensors over the same bytes count once."""
        data = (self.path / self.graph(graph).file).read_bytes()
        tensors: list[dict[bytes, bytes]] = []
        for key, size, value in _ENTRY.findall(data):
            if key == b"location":
                tensors.append({})
            tensors[-1][key] = value[: ord(size)]
        places = {tuple(sorted(entry.items())) for entry in tensors}
        return len(data) + sum(int(dict(place)[b"length"]) for place in places)

    def error(self, message: str) -> BundleError:
        """An error about this bundle, with the command that rebuilds it."""
        command = rebuild_command(self.path, self.manifest.model.source, self.manifest.options)
        return BundleError(f"{self.path}: {message}", command)


def open_bundle(path: Path | str, verify: bool | None = None) -> Bundle:
    """Read and check the bundle at `path`.

    verify: True hashes every file. None hashes none if no file has changed since the last full check on this machine
            (`check_record`), else every file. False hashes none.
    Raises BundleError for: no directory, no or an unknown manifest, files missing or of another size or digest,
    signatures that are not those of `redraft.names`.
    """
    path = Path(path)
    if not path.is_dir():
        raise BundleError(f"expected an engine bundle at {path}, found {'a file' if path.exists() else 'nothing'}",
                          f"run `redraft build MODEL -o {path}`")  # fmt: skip
    bundle = Bundle(path, load_manifest(path))
    problems = (*_sizes(bundle), *_signatures(bundle))
    if not problems and verify is not False:
        problems = _changed_bytes(bundle, trust_record=verify is None)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise bundle.error(problems[0] + more)
    return bundle


def verifier_signature(manifest: Manifest, graph: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that a form of the verifier's graph must have."""
    inputs = signatures.verifier_inputs(manifest.shape)
    outputs = signatures.verifier_outputs(manifest.shape, manifest.hidden_states)
    if graph in (names.VERIFIER_BATCH, names.VERIFIER_OPERATORS):
        return signatures.packed_inputs(inputs), signatures.packed_outputs(outputs)
    if graph == names.VERIFIER_SINGLE:
        return single_chain(inputs), single_sequence(outputs)
    if graph == names.VERIFIER_FAST:
        return single_sequence(inputs), single_sequence(outputs)
    return inputs, outputs


def single_chain(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a verifier's graph for chains of one sequence, which need no mask."""
    return tuple(spec for spec in single_sequence(inputs) if spec.name != names.TREE_MASK)


def _sizes(bundle: Bundle) -> Iterator[str]:
    for name, expected in bundle.manifest.files.items():
        file = bundle.path / name
        if not file.is_file():
            yield f"expected file {name}, found none"
        elif (size := file.stat().st_size) != expected.size:
            yield f"{name}: expected {expected.size} bytes, found {size}"


def _changed_bytes(bundle: Bundle, trust_record: bool) -> tuple[str, ...]:
    """Return the files whose bytes are not the built ones. With `trust_record` the last full check may answer."""
    before = CheckRecord.of(bundle.path, bundle.manifest)
    if trust_record and before.is_kept():
        return ()
    problems = tuple(_digests(bundle))
    if problems:
        before.forget()
    else:
        before.keep()  # a file that changed while it was hashed has another state by now
    return problems


def _digests(bundle: Bundle) -> Iterator[str]:
    found = file_digests(bundle.path / name for name in bundle.manifest.files)
    for name, expected in bundle.manifest.files.items():
        digest = found[bundle.path / name]
        if digest != expected.sha256:
            yield f"{name}: expected SHA-256 {expected.sha256[:12]}…, found {digest[:12]}…"


def _signatures(bundle: Bundle) -> Iterator[str]:
    manifest = bundle.manifest
    if not manifest.drafters.keys().isdisjoint(RESERVED_IDS) or not all(map(DRAFTER_ID.fullmatch, manifest.drafters)):
        yield f"expected ids of drafters, found {', '.join(manifest.drafters)}"
    wanted = {graph: verifier_signature(manifest, graph) for graph in VERIFIERS if graph in manifest.graphs}
    wanted.setdefault(names.VERIFIER, verifier_signature(manifest, names.VERIFIER))
    gathers = any(record.rows != "none" for record in manifest.drafters.values())
    step = signatures.step_signatures(manifest.shape, gathers)
    wanted |= {graph: signature for graph, signature in step.items() if graph in manifest.graphs}
    yield from _graph_differences(wanted, manifest)
    yield from _drafters(bundle)


def _drafters(bundle: Bundle) -> Iterator[str]:
    """Yield the problems of drafters: records, graphs and tables."""
    manifest = bundle.manifest
    digest = verifier_digest(manifest.model.weights)
    for name, record in manifest.drafters.items():
        try:
            drafter = read_drafter(name, record)
        except UsageError as error:
            yield f"drafter {name}: {error.message}"
            continue
        yield from _tables(bundle, drafter)
        yield from drafter_problems(drafter, manifest, digest)
        wanted = drafter_signatures(drafter)
        yield from _graph_differences({drafter.graph(role): signature for role, signature in wanted.items()}, manifest)
        yield from (f"unexpected graph {drafter.graph(role)!r}" for role in record.graphs if role not in wanted)


def _graph_differences(wanted: Mapping[str, signatures.Signature], manifest: Manifest) -> Iterator[str]:
    """Yield the problems of required graphs, by name."""
    graphs = manifest.all_graphs
    for graph, signature in wanted.items():
        if record := graphs.get(graph):
            for expected, found in zip(signature, (record.inputs, record.outputs), strict=True):
                yield from signature_differences(graph, expected, found)
        else:
            yield f"expected a graph {graph!r}, found {', '.join(sorted(graphs)) or 'none'}"


def _tables(bundle: Bundle, drafter: BuiltDrafter) -> Iterator[str]:
    """Yield the problems of a drafter's tables: their places and sizes."""
    refs = {ref.initializer: ref for ref in drafter.record.tables}
    for spec in drafter.method.tables(drafter.shape):
        ref = refs.get(spec.name)
        if ref is None:
            yield f"expected a table {spec.name}, found none"
            continue
        length = math.prod(int(dim) for dim in spec.shape) * np.dtype(spec.dtype).itemsize
        size = bundle.manifest.files[ref.file].size
        fits = (ref.shape, ref.length) == (spec.shape, length) and 0 <= ref.offset <= size - length
        if not fits or _DTYPES.get(ref.dtype) != np.dtype(spec.dtype).type:
            yield (
                f"table {spec.name}: expected {length} bytes of {spec.dtype}{list(spec.shape)} in {ref.file}, "
                f"found {ref.length} of {ref.dtype}{list(ref.shape)} at {ref.offset} of {size}"
            )


def signature_differences(graph: str, expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> Iterator[str]:
    """One line for every tensor of `expected` that `found` lacks or has differently, and for every one too many."""
    by_name = {spec.name: spec for spec in found}
    for spec in expected:
        other = by_name.pop(spec.name, None)
        if other is None:
            yield f"graph {graph}: expected tensor {spec.name}, found none"
        elif other != spec:
            yield f"graph {graph}: expected {_words(spec)}, found {_words(other)}"
    for name in by_name:
        yield f"graph {graph}: unexpected tensor {name}"


def _words(spec: TensorSpec) -> str:
    place = f" in place of {spec.in_place_of}" if spec.in_place_of else ""
    return f"{spec.name} {spec.dtype}[{','.join(map(str, spec.shape))}]{place}"
