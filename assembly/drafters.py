"""Drafters of a bundle during its build: each one's method, graphs, tables and record."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.assembly.preflight import check_file
from redraft.config import NATIVE, RANDOM, BuildConfig, DrafterBuild
from redraft.engines.digests import DigestCache
from redraft.engines.manifest import DrafterRecord, GraphRecord, verifier_digest
from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.gguf.checkpoint import SUFFIX, open_checkpoint
from redraft.methods import Method, built_methods, find_method, native_method
from redraft.names import COPY_SLOT, batch, drafter_graph, single

if TYPE_CHECKING:
    from collections.abc import Callable

    from redraft.export.drafters import ExportedDrafter
    from redraft.export.drafters.exporter import Exporter
    from redraft.export.verifier import VerifierExport

_ONNX_TYPES = {"float32": "float"}
"""ONNX's names of element types that differ from redraft's."""
_READ = (".json", ".safetensors", ".bin")
"""Suffixes of the files of a drafter's folder that a build reads."""


def method_of(drafter: DrafterBuild) -> Method[Any]:
    """Return the method of a drafter. Raises UsageError for a method that needs no drafter in a bundle."""
    assert drafter.method is not None, "resolve_drafters names it"
    method = find_method(drafter.method)
    if not method.is_built:
        known = ", ".join(built_methods())
        raise UsageError(f"drafter {drafter.id}: method {method.id} needs no drafter", f"the others are {known}")
    return method


def resolve_drafters(config: BuildConfig, checkpoint: AnyCheckpoint) -> BuildConfig:
    """Return the configuration with every drafter's method, and the hidden states that the methods read.

    Drafters without a source, which are a recipe's settings without a folder, are left out. Raises UsageError for an
    unknown method or option, and CheckpointError for a folder without a drafter of a known layout.
    """
    drafters = []
    for drafter in config.drafters:
        if drafter.source is not None:
            named = replace(drafter, method=drafter.method or _named_method(drafter))
            build_options(named, config)
            if drafter.source == NATIVE and config.random_weights:
                raise UsageError(
                    f"drafter {drafter.id}: a verifier with random weights has no drafter inside",
                    f"give {drafter.id}={RANDOM},method={named.method}",
                )
            _check_layout(named)
            drafters.append(named)
    wanted = {state for drafter in drafters for state in _hidden_states(drafter, checkpoint)}
    hidden_states = (*config.hidden_states, *sorted(wanted - set(config.hidden_states)))
    return replace(config, hidden_states=hidden_states, drafters=tuple(drafters))


def build_options(drafter: DrafterBuild, config: BuildConfig) -> Any:
    """Return a drafter's options as its method's type. Raises UsageError.

    TensorRT has no operator like MatMulNBits, so its drafters take the verifier's compute type by default.
    """
    options = method_of(drafter).parse_build(drafter.options, f"drafter {drafter.id}")
    if options.precision is None and config.for_tensorrt:
        return replace(options, precision=config.compute_dtype)
    return options


def check_drafters(config: BuildConfig, checkpoint: AnyCheckpoint, digests: Mapping[str, str]) -> None:
    """Check drafters before any export: their options, and that they fit this verifier.

    digests: of the checkpoint's files, by name. Raises CheckpointError and UsageError.
    """
    if not config.drafters:
        return  # without PyTorch
    from redraft.export.checkpoint import model_config
    from redraft.export.checkpoint.model_config import decoder_shape
    from redraft.export.drafters import find_exporter
    from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, is_plain_checkpoint
    from redraft.export.drafters.draft_vocabulary import check_counted
    from redraft.export.drafters.published import recognise

    for drafter in config.drafters:
        path = Path(str(drafter.source))
        options = build_options(drafter, config)
        plain = drafter.source != RANDOM and is_plain_checkpoint(path)
        if drafter.source == NATIVE or plain:
            what = "a checkpoint's module" if drafter.source == NATIVE else "a plain checkpoint"
            check_counted(drafter.id, options.draft_vocabulary, what)
        if drafter.source in (RANDOM, NATIVE) or recognise(path):
            continue
        if plain:
            _check_draft_model(drafter, path, checkpoint, config)
            continue
        opened = DrafterCheckpoint.open(path)
        settings = find_exporter(method_of(drafter).id).configure(opened, options)
        shape = decoder_shape(model_config.load_config(checkpoint))
        identity = Identity.from_digests(checkpoint, digests)
        opened.entries()  # refuses a truncated file
        opened.check_verifier(settings, shape.hidden, shape.vocabulary, identity)


def _check_draft_model(drafter: DrafterBuild, path: Path, checkpoint: AnyCheckpoint, config: BuildConfig) -> None:
    """Check a draft model's file, tokens and length of texts. Raises CheckpointError, UnsupportedModelError."""
    from redraft.assembly.tokenizers import Tokens, check_same_tokens
    from redraft.export.checkpoint.architecture import Architecture
    from redraft.export.checkpoint.model_config import load_config, verifier_shape
    from redraft.export.drafters.decoder_drafter import sizes_of

    own = open_checkpoint(path)
    check_file(own)
    text, verifiers = (Architecture.of(load_config(model)).text for model in (own, checkpoint))
    sizes_of(drafter.id, text, verifier_shape(verifiers, config.max_model_len).max_positions)
    check_same_tokens(f"drafter {drafter.id}", path, Tokens.of(own), Tokens.of(checkpoint))


def native_drafter(path: Path) -> str:
    """Return a line about the drafter inside of the checkpoint in `path`; empty if it has none. Imports torch."""
    from redraft.export.drafters import find_exporter

    try:
        return find_exporter(native_method()).find_native(open_checkpoint(path)).description
    except CheckpointError:
        return ""


def drafter_digests(config: BuildConfig, checkpoint: AnyCheckpoint | None = None) -> dict[str, str]:
    """Return SHA-256 digests by name of the files of all drafters. A later step reports missing files.

    checkpoint: the verifier's, which may have drafters inside.
    """
    found: dict[str, str] = {}
    for drafter in config.drafters:
        if drafter.source not in (None, RANDOM):
            digests = DigestCache().digests(_files(drafter, checkpoint))
            found |= {f"drafter {drafter.id} {path.name}": digest for path, digest in digests.items()}
    return found


def _files(drafter: DrafterBuild, checkpoint: AnyCheckpoint | None) -> list[Path]:
    """Return the files of a drafter that a build reads."""
    if drafter.source == NATIVE:
        assert checkpoint is not None
        return [checkpoint.path / file for file in _native(drafter).find_native(checkpoint).files]
    source = Path(str(drafter.source))
    return [source] if source.suffix == SUFFIX else [p for p in sorted(source.glob("*")) if p.suffix in _READ]


def stage_drafters(
    checkpoint: AnyCheckpoint, digests: Mapping[str, str], verifier: VerifierExport, config: BuildConfig, folder: Path,
    report: Callable[[str], None],
) -> dict[str, DrafterRecord]:  # fmt: skip
    """Write graphs and tables of all drafters into `folder`. Returns their records by id.

    Raises CheckpointError for a drafter of another verifier, and UsageError for an id that the verifier's files use.
    """
    records = {}
    for drafter in config.drafters:
        _check_free(drafter.id, verifier, folder)
        exported = _export(checkpoint, digests, verifier, drafter, config, folder, report)
        weights = {name: digests[name] for name in checkpoint.files if name in digests}
        records[drafter.id] = _record(drafter, exported, verifier_digest(weights), folder)
    return records


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


def _named_method(drafter: DrafterBuild) -> str:
    from redraft.export.drafters.published import named_method

    if drafter.source == RANDOM:
        known = ", ".join(built_methods())
        raise UsageError(f"drafter {drafter.id}: random weights need a method", f"give method= one of {known}")
    if drafter.source == NATIVE:
        return native_method()
    return named_method(Path(str(drafter.source)), drafter.id)


def _check_layout(drafter: DrafterBuild) -> None:
    from redraft.export.drafters.published import check_layout

    if drafter.source not in (RANDOM, NATIVE):
        check_layout(Path(str(drafter.source)), method_of(drafter).id)


def _hidden_states(drafter: DrafterBuild, checkpoint: AnyCheckpoint) -> tuple[str, ...]:
    """Return the hidden states that a drafter reads: those that its folder says, else its method's."""
    from redraft.export.drafters.published import read_states

    if drafter.source == NATIVE:
        return _native(drafter).find_native(checkpoint).hidden_states
    own = None if drafter.source == RANDOM else read_states(Path(str(drafter.source)), checkpoint)
    return method_of(drafter).hidden_states if own is None else own


def _native(drafter: DrafterBuild) -> Exporter[Any]:
    """Return the exporter of a drafter inside of the verifier's checkpoint. Raises UsageError for another method."""
    from redraft.export.drafters import find_exporter

    method = method_of(drafter)
    if not method.native:
        raise UsageError(
            f"drafter {drafter.id}: no checkpoint has a drafter of {method.id} inside",
            f"leave out method=, or give method={native_method()}",
        )
    return find_exporter(method.id)


def _check_free(drafter: str, verifier: VerifierExport, folder: Path) -> None:
    taken = any(ref.initializer.startswith(f"{drafter}.") for ref in verifier.weights)
    if taken or any(path.name.partition(".")[0] == drafter for path in (folder / "weights").glob("*")):
        raise UsageError(f"the verifier has weights called {drafter!r}", "give the drafter another id")


def _export(
    checkpoint: AnyCheckpoint, digests: Mapping[str, str], verifier: VerifierExport, drafter: DrafterBuild,
    config: BuildConfig, folder: Path, report: Callable[[str], None],
) -> ExportedDrafter:  # fmt: skip
    from redraft.export.checkpoint import model_config
    from redraft.export.drafters import find_exporter
    from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, is_plain_checkpoint
    from redraft.export.drafters.published import convert, recognise
    from redraft.export.drafters.writing import Target

    def progress(stage: str, done: int, total: int) -> None:
        report(f"{stage} {done}/{total}" if total > 1 else stage)

    method = method_of(drafter)
    exporter = find_exporter(method.id)
    target = Target(drafter.id, verifier, folder, build_options(drafter, config), progress)
    if drafter.source == RANDOM:
        return exporter.random(target, model_config.load_config(checkpoint))
    if drafter.source == NATIVE:
        native = _native(drafter)
        report(f"drafter {drafter.id}: {native.find_native(checkpoint).description}")
        return native.native(target, checkpoint)
    path, identity = Path(str(drafter.source)), Identity.from_digests(checkpoint, digests)
    if published := recognise(path):
        report(f"drafter {drafter.id}: {published.description}")
        with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
            converted = convert(path, checkpoint, identity, Path(scratch))
            return exporter.trained(target, converted, identity)
    if method.takes_checkpoints and is_plain_checkpoint(path):
        return exporter.checkpoint(target, open_checkpoint(path))
    return exporter.trained(target, DrafterCheckpoint.open(path), identity)


def _record(drafter: DrafterBuild, exported: ExportedDrafter, digest: str, folder: Path) -> DrafterRecord:
    """Write the graph that copies a slot and the CPU graphs. Returns the drafter's record."""
    from redraft.engines.lowering import lower_any, lower_batch, lower_chain, lower_single
    from redraft.export.drafters import graph_file
    from redraft.export.graph.step_graphs import export_slot_copy

    method, shape = method_of(drafter), exported.shape
    state = method.state(shape)
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
            if graph.chain_steps and on_cpu:
                one = lower_chain(folder, portable, for_one)
        graphs |= {form(role): lowered for form, lowered in ((batch, several), (single, one)) if lowered}
    return DrafterRecord(
        method=method.id,
        verifier_digest=digest,
        precision=exported.precision,
        hidden_states=method.states_of(shape),
        rows=method.rows,
        graphs=graphs,
        state=state,
        limits=method.limits(shape),
        shape=asdict(shape),
        weights=exported.weights,
        tables=exported.tables,
    )
