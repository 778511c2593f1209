"""Opening an engine bundle. It fails closed: what was expected, what was found, and the command that mends it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from redraft import names, signatures
from redraft.engines.digests import file_digests
from redraft.engines.huge_pages import huge_pages
from redraft.engines.manifest import GraphRecord, Manifest, load_manifest, rebuild_command
from redraft.engines.writer import BundleWriter
from redraft.errors import BundleError
from redraft.names import TensorSpec
from redraft.signatures import LyannaShape

_DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8, "I64": np.int64}

VERIFIERS = (names.VERIFIER, names.VERIFIER_BATCH, names.VERIFIER_SINGLE, names.VERIFIER_FAST)
"""The forms of the verifier's graph. Every bundle has the first one."""

__all__ = ["Bundle", "BundleWriter", "open_bundle", "verifier_signature"]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read and whose files have been checked."""

    path: Path
    manifest: Manifest

    def graph(self, name: str) -> GraphRecord:
        """The record of graph `name`. Raises BundleError where the bundle has none."""
        record = self.manifest.graphs.get(name)
        if record is None:
            raise self.error(f"expected a graph {name!r}, found {', '.join(sorted(self.manifest.graphs))}")
        return record

    def host_graph(self, single: bool, exact: bool = True) -> str:
        """The verifier's graph that the CPU runs, for one sequence at once or for any number.

        One for chains alone has no mask.
        """
        one = names.VERIFIER_SINGLE if exact else names.VERIFIER_FAST
        wanted = (*((one,) if single else ()), names.VERIFIER_BATCH)
        return next((name for name in wanted if name in self.manifest.graphs), names.VERIFIER)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor that the manifest lists as `name`, read into memory."""
        ref = next((ref for ref in self.manifest.weights if ref.initializer == name), None)
        if ref is None:
            raise self.error(f"expected a tensor {name!r}, found none")
        with huge_pages():
            values = np.fromfile(self.path / ref.file, _DTYPES[ref.dtype], math.prod(ref.shape), offset=ref.offset)
        return values.reshape(ref.shape)

    def error(self, message: str) -> BundleError:
        """An error about this bundle, with the command that rebuilds it."""
        command = rebuild_command(self.path, self.manifest.model.source, self.manifest.options)
        return BundleError(f"{self.path}: {message}", command)


def open_bundle(path: Path | str, verify: bool = True) -> Bundle:
    """Read and check the bundle at `path`; with `verify`, every byte of it against the digests (not from any cache).

    Raises BundleError for: no directory, no or an unknown manifest, files missing or of another size or digest,
    signatures that are not those of `redraft.names`.
    """
    path = Path(path)
    if not path.is_dir():
        raise BundleError(f"expected an engine bundle at {path}, found {'a file' if path.exists() else 'nothing'}",
                          f"run `redraft build MODEL -o {path}`")  # fmt: skip
    bundle = Bundle(path, load_manifest(path))
    problems = (*_sizes(bundle), *_signatures(bundle))
    if not problems and verify:
        problems = (*_digests(bundle),)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise bundle.error(problems[0] + more)
    return bundle


def verifier_signature(manifest: Manifest, graph: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs that a form of the verifier's graph must have."""
    inputs = signatures.verifier_inputs(manifest.shape)
    outputs = signatures.verifier_outputs(manifest.shape, manifest.hidden_states)
    if graph in (names.VERIFIER_SINGLE, names.VERIFIER_FAST):
        return single_chain(inputs), single_sequence(outputs)
    return inputs, outputs


def single_chain(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Inputs of a verifier's graph for chains of one sequence, which need no mask."""
    return tuple(spec for spec in single_sequence(inputs) if spec.name != names.TREE_MASK)


def single_sequence(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The same tensors with the symbol B fixed to 1."""
    return tuple(replace(spec, shape=tuple(1 if dim == "B" else dim for dim in spec.shape)) for spec in specs)


def lyanna_signatures(
    manifest: Manifest, shape: LyannaShape
) -> dict[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]]:
    """Inputs and outputs by graph that a drafter of this shape must have."""
    inputs, outputs = signatures.lyanna_draft_inputs(shape), signatures.lyanna_draft_outputs(shape)
    graphs = {names.LYANNA_DRAFT: (inputs, outputs)}
    if shape.steps > 1:
        graphs[names.LYANNA_RESAMPLE] = (
            signatures.lyanna_resample_inputs(shape),
            signatures.lyanna_resample_outputs(shape),
        )
    if names.LYANNA_DRAFT_SINGLE in manifest.graphs:
        graphs[names.LYANNA_DRAFT_SINGLE] = (single_sequence(inputs), single_draft_outputs(outputs, shape.steps))
    return graphs


def single_draft_outputs(outputs: tuple[TensorSpec, ...], steps: int) -> tuple[TensorSpec, ...]:
    """Outputs of a draft graph lowered for one sequence: each step but the last updates the buffers by its own name."""
    single = single_sequence(outputs)
    updates = [spec for spec in single if spec.in_place_of]
    return (*single, *(replace(spec, name=f"{spec.name}.{step}") for step in range(steps - 1) for spec in updates))


def _sizes(bundle: Bundle) -> Iterator[str]:
    for name, expected in bundle.manifest.files.items():
        file = bundle.path / name
        if not file.is_file():
            yield f"expected file {name}, found none"
        elif (size := file.stat().st_size) != expected.size:
            yield f"{name}: expected {expected.size} bytes, found {size}"


def _digests(bundle: Bundle) -> Iterator[str]:
    found = file_digests(bundle.path / name for name in bundle.manifest.files)
    for name, expected in bundle.manifest.files.items():
        digest = found[bundle.path / name]
        if digest != expected.sha256:
            yield f"{name}: expected SHA-256 {expected.sha256[:12]}…, found {digest[:12]}…"


def _signatures(bundle: Bundle) -> Iterator[str]:
    manifest = bundle.manifest
    known = {graph: verifier_signature(manifest, graph) for graph in VERIFIERS}
    if manifest.lyanna:
        known |= lyanna_signatures(manifest, manifest.lyanna)
        yield from _tables(bundle, manifest.lyanna)
    step = signatures.step_signatures(manifest.shape, manifest.lyanna)
    known |= {graph: signature for graph, signature in step.items() if graph in manifest.graphs}
    for graph, signature in known.items():
        if record := manifest.graphs.get(graph):
            for expected, found in zip(signature, (record.inputs, record.outputs), strict=True):
                yield from signature_differences(graph, expected, found)
        elif graph not in VERIFIERS[1:]:
            yield f"expected a graph {graph!r}, found {', '.join(sorted(manifest.graphs)) or 'none'}"


def _tables(bundle: Bundle, shape: LyannaShape) -> Iterator[str]:
    """What does not fit about where token information lies."""
    refs = {ref.initializer: ref for ref in bundle.manifest.weights}
    for spec in signatures.token_info_tables(shape):
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
