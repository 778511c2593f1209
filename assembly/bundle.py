"""Builds an engine bundle from a checkpoint: graph, lowering, tokenizer, perplexity, manifest, then one rename."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import redraft.engines
import redraft.export
import redraft.methods
from redraft import names, signatures
from redraft.assembly import tokenizers
from redraft.assembly.drafters import check_drafters, drafter_digests, resolve_drafters, stage_drafters
from redraft.assembly.evaluation import perplexities
from redraft.assembly.models import Model, Report
from redraft.assembly.options import options_of
from redraft.assembly.self_check import ROUNDED, check_bundle, known_texts
from redraft.config import RANDOM, WEIGHT_ONLY, BuildConfig
from redraft.engines import Bundle, BundleWriter
from redraft.engines.cache import build_key, code_digests, is_current
from redraft.engines.digests import DigestCache, text_digest
from redraft.engines.host_memory import available_bytes
from redraft.engines.manifest import GraphRecord, Manifest, ModelIdentity, Quality, load_manifest
from redraft.engines.tensorrt.tools import find_tools
from redraft.errors import BackendError
from redraft.export.checkpoint import AnyCheckpoint, Checkpoint
from redraft.export.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from redraft.export.quiet import quiet_export
from redraft.garbage import libraries_kept
from redraft.interrupts import interrupts_deferred
from redraft.packages import package_version

if TYPE_CHECKING:
    from redraft.export.verifier import VerifierExport

TOOLS = (
    "redraft", "torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "gguf",
)  # fmt: skip
SPARE_BYTES = 16 << 20
GIB = 1 << 30
CHECKED_NUMBERS = 1_000_000_000
"""Weights of the largest model that is checked whole. Only the first layers of larger models are checked."""
COPIES = 3
"""Copies of the fp32 weights in memory while a whole model is checked: transformers', the engine's, its packed ones."""


def build_bundle(
    model: Model, config: BuildConfig, out: Path, texts: Mapping[str, str], force: bool, report: Report,
    check: bool = True,
) -> tuple[Manifest, bool]:  # fmt: skip
    """Build the bundle `out`, unless it is current.

    check: compare the engines with transformers' own model before the final rename.
    texts: held-out text by kind, for the perplexity in the manifest; not measured for random weights.
    Returns the manifest, and True if the bundle was current.
    Raises CheckpointError, UnsupportedModelError, BundleError.
    """
    report("reading the checkpoint")
    checkpoint = open_checkpoint(model.path, weights=not config.random_weights)
    digests = _digests(checkpoint)
    texts = {} if config.random_weights else texts
    config = resolve_drafters(config, checkpoint)
    check_drafters(config, checkpoint, digests)
    shape = {"shape": text_digest(json.dumps(dict(model.shape), sort_keys=True))}
    tools = find_tools(config) if config.backend == "tensorrt" else None
    checked = {} if check else {"check": "skipped"}
    key = _key(
        digests | drafter_digests(config, checkpoint) | shape | checked | (tools.digests() if tools else {}),
        config,
        texts,
    )
    if not force and is_current(out, key):
        return load_manifest(out), True
    _load_libraries()
    with BundleWriter(out, model.name, force, config.random_weights) as writer:
        writer.reserve(_needed_bytes(checkpoint, config, writer.staging))
        manifest = _stage(checkpoint, digests, model, config, writer.staging, report)
        weights = {name: digests[name] for name in checkpoint.files}
        options = (*model.options, *options_of(model.build, config))
        manifest = replace(manifest, build_key=key, options=options, model=replace(manifest.model, weights=weights))
        if check and not config.random_weights:
            _check(checkpoint, model, Bundle(writer.staging, manifest), out, report)
        quality = _quality(checkpoint, model, Bundle(writer.staging, manifest), texts, out, report)
        if tools:
            from redraft.engines.tensorrt.stage import stage_engines

            manifest = stage_engines(writer.staging, manifest, config.tensorrt, tools, report)
        report("writing the bundle")
        return writer.commit(replace(manifest, quality=quality)), False


def _load_libraries() -> None:
    """Import PyTorch and its users, which takes a second or two and must not be interrupted."""
    if "redraft.export.verifier" in sys.modules:
        return
    with interrupts_deferred(), libraries_kept():
        import redraft.export.verifier
        import redraft.export.weights  # noqa: F401


def _stage(
    checkpoint: AnyCheckpoint, digests: Mapping[str, str], model: Model, config: BuildConfig, folder: Path,
    report: Report, layers: int | None = None,
) -> Manifest:  # fmt: skip
    """Write every file of a bundle except the manifest. Returns the manifest without digests."""
    report("loading the exporter")
    from redraft.export import support  # imports torch, which a current bundle must not wait for
    from redraft.export.verifier import export_verifier

    architecture = support.load_config(checkpoint)
    support.check_shape(architecture, model.shape, model.source)
    stand_in = config.random_weights and not _has_tokenizer(checkpoint)
    special = (
        tokenizers.write_stand_in(folder, architecture.get_text_config(decoder=True).vocab_size)
        if stand_in
        else _write_text(checkpoint, folder)
    )
    quiet_export()
    exported = export_verifier(checkpoint, folder, config, lambda *stage: report(_stage_line(*stage)), layers)
    drafters = stage_drafters(checkpoint, digests, exported, config, folder, report)
    return Manifest(
        name=model.name,
        model=ModelIdentity(
            source=model.source,
            architecture=next(iter(checkpoint.config.get("architectures") or ()), "unknown"),
            weights={},
            random_weights=config.random_weights,
            random_drafters=tuple(drafter.id for drafter in config.drafters if drafter.source == RANDOM),
            stand_in_tokenizer=stand_in,
            inexact=checkpoint.inexact() if isinstance(checkpoint, GgufCheckpoint) else (),
        ),
        backend=config.backend,
        backend_version=package_version("onnxruntime") or "unknown",
        precision=config.precision,
        shape=exported.shape,
        max_model_len=exported.shape.max_positions,
        bos_token_id=special.bos,
        eos_token_ids=special.eos,
        hidden_states=exported.hidden_states,
        graphs={
            **_graphs(exported, folder),
            **_step_graphs(exported, any(record.rows != "none" for record in drafters.values()), folder),
        },
        weights=exported.weights,
        drafters=drafters,
        tools=_tools(),
    )


def _has_tokenizer(checkpoint: AnyCheckpoint) -> bool:
    """Return True if the checkpoint has a tokenizer. A GGUF file always has one."""
    return isinstance(checkpoint, GgufCheckpoint) or tokenizers.has_tokenizer(checkpoint.path)


def _write_text(checkpoint: AnyCheckpoint, folder: Path) -> tokenizers.SpecialTokens:
    """Put tokenizer and chat templates into `folder`."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return tokenizers.write_text_files(checkpoint.path, folder)
    with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
        checkpoint.write_text_files(Path(scratch))
        return tokenizers.write_text_files(Path(scratch), folder)


def _graphs(exported: VerifierExport, folder: Path) -> dict[str, GraphRecord]:
    """Write the portable graph, and graphs lowered to CPU kernels: for any batch, and for one sequence if they fit."""
    from redraft.engines.lowering import lower_batch, lower_single

    outputs = signatures.verifier_outputs(exported.shape, exported.hidden_states)
    portable = GraphRecord(exported.graph, signatures.verifier_inputs(exported.shape), outputs)
    graphs = {names.VERIFIER: portable}
    if exported.shape.dtype == "float32":
        lowered = {
            names.VERIFIER_BATCH: lower_batch(folder, portable),
            names.VERIFIER_SINGLE: lower_single(folder, portable),
            names.VERIFIER_FAST: lower_single(folder, portable, exact=False),
        }
        graphs |= {name: record for name, record in lowered.items() if record is not None}
    return graphs


def _step_graphs(exported: VerifierExport, gathers: bool, folder: Path) -> dict[str, GraphRecord]:
    """Write the graphs that a device runs between engine calls. gathers: True if a drafter reads hidden states."""
    from redraft.export.step_graphs import export_step_graphs

    files = export_step_graphs(exported.shape, folder, gathers)
    of_graphs = signatures.step_signatures(exported.shape, gathers)
    return {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}


def _quality(
    checkpoint: AnyCheckpoint, model: Model, staged: Bundle, texts: Mapping[str, str], out: Path, report: Report
) -> Quality | None:
    """Return the perplexity of the bundle and of its model in fp32, which it builds and deletes."""
    if not texts:
        return None
    report("measuring perplexity on held-out text")
    measured = perplexities(staged, texts)
    if staged.manifest.precision == "fp32":
        return Quality(measured, measured)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.building-fp32-", dir=out.parent) as folder:
        exact = BuildConfig(precision="fp32", max_model_len=staged.manifest.max_model_len)
        manifest = _stage(checkpoint, {}, model, exact, Path(folder), report)
        return Quality(measured, perplexities(Bundle(Path(folder), manifest), texts))


def _check(checkpoint: AnyCheckpoint, model: Model, staged: Bundle, out: Path, report: Report) -> None:
    """Compare the staged engines with transformers' own model. Raises UnsupportedModelError if they differ.

    Raises BackendError if memory is too small, since only the user may skip the comparison. In fp32, the engines must
    agree to rounding. In other precisions, an fp32 export of the first layers must agree to rounding, and the engines
    as well as their precision allows. If memory cannot hold three copies of an fp32 model, only its first layers are
    compared. Engines that do not fit in memory, or that the CPU cannot run, are not compared.
    """
    from redraft.export.reference import count_numbers, enough_layers, reference_logits

    report("checking against transformers")
    manifest = staged.manifest
    texts = known_texts(manifest.shape.vocabulary, checkpoint.config, manifest.max_model_len)
    numbers = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    whole = numbers <= CHECKED_NUMBERS and COPIES * 4 * numbers <= (available_bytes() or 0)
    exact = whole and manifest.precision == "fp32"
    if whole and (exact or (manifest.precision in ROUNDED and manifest.backend == "onnxruntime")):
        compared = check_bundle(staged, texts, reference_logits(checkpoint, texts), manifest.precision)
        report(compared.describe("" if exact else f"{manifest.precision}, which rounds"))
    if exact:
        return
    layers = enough_layers(checkpoint)
    needed, available = COPIES * 4 * count_numbers(checkpoint, layers), available_bytes()
    if available is not None and needed > available:
        raise BackendError(
            f"checking {layers} layers in fp32 takes {needed / GIB:.1f} GiB of memory; {available / GIB:.1f} are free",
            "free memory, or build with --skip-check",
        )
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.building-check-", dir=out.parent) as folder:
        config = BuildConfig(precision="fp32", max_model_len=manifest.max_model_len)
        first = _stage(checkpoint, {}, model, config, Path(folder), report, layers)
        compared = check_bundle(Bundle(Path(folder), first), texts, reference_logits(checkpoint, texts, layers), "fp32")
        report(compared.describe(f"the same graph without rounding, first {layers} layers"))


def _digests(checkpoint: AnyCheckpoint) -> dict[str, str]:
    """Return the SHA-256 by name of every file of the checkpoint that a build reads."""
    of_folder = isinstance(checkpoint, Checkpoint)
    text_files = ("config.json", *tokenizers.text_files(checkpoint.path)) if of_folder else ()
    listed = (*text_files, *checkpoint.files)
    paths = {name: checkpoint.path / name for name in listed if (checkpoint.path / name).is_file()}
    found = DigestCache().digests(paths.values())
    return {name: found[path] for name, path in paths.items()}


def _key(digests: Mapping[str, str], config: BuildConfig, texts: Mapping[str, str]) -> str:
    evaluated = {f"text {kind}": text_digest(text) for kind, text in texts.items()}
    packages = (redraft.methods, redraft.engines, redraft.export)
    folders = [Path(__file__).parent, *(Path(str(package.__file__)).parent for package in packages)]
    return build_key({**digests, **evaluated}, config, _tools(), code_digests(*map(Path.resolve, folders)))


def _tools() -> dict[str, str]:
    return {name: package_version(name) or "none" for name in TOOLS}


def _needed_bytes(checkpoint: AnyCheckpoint, config: BuildConfig, folder: Path) -> int:
    """Return an upper bound of the weights' bytes: zero for hard links, fp32 for quantized tensors."""
    from redraft.export.checkpoint import ITEM_BYTES
    from redraft.export.sources import LINK_FROM_BYTES
    from redraft.export.weight_files import STORED

    linked = set()
    dtype = STORED[config.compute_dtype]
    if config.precision not in WEIGHT_ONLY and not config.random_weights:
        files = {name: (checkpoint.path / name).stat() for name in checkpoint.files}
        device = folder.stat().st_dev
        linked = {name for name, s in files.items() if s.st_size >= LINK_FROM_BYTES and s.st_dev == device}
    copied = [e for e in checkpoint.tensors.values() if not (e.file in linked and e.dtype == dtype)]
    return sum(ITEM_BYTES[dtype] * math.prod(entry.shape) for entry in copied) + SPARE_BYTES


def _stage_line(stage: str, done: int, total: int) -> str:
    return f"{stage} {done}/{total}" if total > 1 else stage
