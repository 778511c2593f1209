"""Builds engine bundles: a request is resolved, then its stages run: read, trace, quantize, lower, check, write."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from redraft import signatures
from redraft.assembly import tokenizers
from redraft.assembly.drafter_graphs import write_drafter
from redraft.assembly.drafters import native_drafter
from redraft.assembly.models import Model
from redraft.assembly.options import DEFAULT_TOKENS, BuildRequest
from redraft.assembly.preflight import needs_of
from redraft.assembly.progress import CHECK, DRAFTERS, WRITE, BuildProgress, Reporter, expected_seconds
from redraft.assembly.resolve import ResolvedBuild, Target, resolve, resolve_build, tool_versions
from redraft.assembly.self_check import check_engines
from redraft.assembly.tokenizer_conversion import vocabulary_file
from redraft.assembly.verifier import SharedWork, write_measured
from redraft.config import RANDOM, BuildConfig
from redraft.engines import Bundle, BundleWriter
from redraft.engines.manifest import GraphRecord, Manifest, ModelIdentity, verifier_digest
from redraft.engines.tensorrt.target import check_buildable
from redraft.export.gguf.checkpoint import GgufCheckpoint
from redraft.packages import package_version

if TYPE_CHECKING:
    from redraft.export.verifier import TracedVerifier, VerifierExport

SPARE_BYTES = 16 << 20
"""Disk for graphs, tokenizer and manifest."""


@dataclass(frozen=True)
class Built:
    """A bundle of a request.

    cached: True if it was current.   seconds: that its build took.
    native: a line about a drafter inside of the checkpoint, if the bundle has no drafter.
    """

    out: Path
    manifest: Manifest
    cached: bool
    seconds: float
    native: str = ""


def build_bundles(request: BuildRequest, report: Reporter) -> list[Built]:
    """Build a bundle for each precision of a request, unless it is current.

    Raises RedraftError; everything that is wrong with the request is found before anything slow.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
        builds = resolve(request, Path(scratch), report)
        return list(_run(builds, Path(scratch), report, time.monotonic()))


def build_bundle(  # noqa: PLR0913 - the options of a build by Python callers
    model: Model, config: BuildConfig, out: Path, texts: Mapping[str, str] | None = None, force: bool = False,
    report: Reporter = lambda message: None, check: bool = True, tokens: int = DEFAULT_TOKENS,
) -> tuple[Manifest, bool]:  # fmt: skip
    """Build the bundle `out` of a model, unless it is current.

    texts: held-out text by kind; none by default.   Others are as in `BuildRequest`.
    Returns the manifest, and True if the bundle was current. Raises like `build_bundles`.
    """
    request = BuildRequest(model.source, texts=texts or {}, tokens=tokens, check=check, force=force)
    with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
        build = resolve_build(model, Target.of(config, check_buildable(config)), out, request, report)
        (built,) = _run([build], Path(scratch), report, time.monotonic())
        return built.manifest, built.cached


def _run(builds: Sequence[ResolvedBuild], scratch: Path, report: Reporter, start: float) -> Iterator[Built]:
    """Build the bundles that are not current, one after the other. start: the time at which the first one begins."""
    work = SharedWork(builds, scratch)
    for build in builds:
        cached, native = build.current is not None, ""
        manifest = build.current or _build(build, work, report)
        if not (cached or manifest.drafters or build.config.random_weights):
            native = native_drafter(build.model.path)
        now = time.monotonic()
        yield Built(build.out, manifest, cached, now - start, native)
        start = now


def _build(build: ResolvedBuild, work: SharedWork, report: Reporter) -> Manifest:
    """Run the stages of one build. Returns the manifest of the written bundle."""
    config = build.config
    with (
        BuildProgress(report) as progress,
        BundleWriter(build.out, build.model.name, build.force, config.random_weights) as writer,
    ):
        progress.expect(expected_seconds(build, bool(work.traces), work.reference is not None))
        folder = writer.staging
        writer.reserve(needs_of(build.checkpoint, config, build.out, 0).disk + SPARE_BYTES)
        special = _write_text(build, folder)
        traced = work.trace(build.checkpoint, config, progress)
        reference = work.run_reference(build, traced, folder, progress)
        staged = Bundle(folder, _manifest(build, traced, special))
        exported, manifest = write_measured(config, traced, staged, reference, progress)
        exported = replace(exported, second_moment=work.second_moment(build, traced, folder, progress))
        with progress.stage(DRAFTERS):
            digest = verifier_digest(build.weights)
            drafters = {each.id: write_drafter(each, exported, digest, folder, progress.say) for each in build.drafters}
            steps = _step_graphs(exported, any(record.rows != "none" for record in drafters.values()), folder)
        manifest = replace(manifest, graphs={**manifest.graphs, **steps}, drafters=drafters)
        if build.check and not config.random_weights:
            with progress.stage(CHECK):
                check_engines(build, Bundle(folder, manifest), traced, work, progress)
        if build.tools:
            from redraft.engines.tensorrt.stage import stage_engines

            manifest = stage_engines(folder, manifest, config.tensorrt, build.tools, progress.say)
        with progress.stage(WRITE):
            return writer.commit(manifest)


def _write_text(build: ResolvedBuild, folder: Path) -> tokenizers.SpecialTokens:
    """Put tokenizer and chat templates into `folder`; of a shape without any, a stand-in."""
    from redraft.export.checkpoint.model_config import load_config

    checkpoint = build.checkpoint
    if _stands_in(build):
        vocabulary = load_config(checkpoint).get_text_config(decoder=True).vocab_size
        return tokenizers.write_stand_in(folder, vocabulary)
    if not isinstance(checkpoint, GgufCheckpoint):
        return tokenizers.write_text_files(checkpoint.path, folder)
    with tempfile.TemporaryDirectory(prefix="redraft-") as scratch:
        checkpoint.write_text_files(Path(scratch))
        return tokenizers.write_text_files(Path(scratch), folder)


def _stands_in(build: ResolvedBuild) -> bool:
    """Return True for a shape without a tokenizer. A GGUF file always has one."""
    folder = not isinstance(build.checkpoint, GgufCheckpoint)
    return build.config.random_weights and folder and vocabulary_file(build.checkpoint.path) is None


def _manifest(build: ResolvedBuild, traced: TracedVerifier, special: tokenizers.SpecialTokens) -> Manifest:
    """Return the manifest of a build, without graphs and digests."""
    checkpoint, config, shape = build.checkpoint, build.config, traced.decoder.shape
    return Manifest(
        name=build.model.name,
        build_key=build.key,
        options=build.options,
        model=ModelIdentity(
            source=build.model.source,
            architecture=next(iter(checkpoint.config.get("architectures") or ()), "unknown"),
            weights=build.weights,
            random_weights=config.random_weights,
            random_drafters=tuple(drafter.id for drafter in config.drafters if drafter.source == RANDOM),
            stand_in_tokenizer=_stands_in(build),
            inexact=checkpoint.inexact() if isinstance(checkpoint, GgufCheckpoint) else (),
        ),
        backend=config.backend,
        backend_version=package_version("onnxruntime") or "unknown",
        precision=config.precision,
        shape=shape,
        max_model_len=shape.max_positions,
        bos_token_id=special.bos,
        eos_token_ids=special.eos,
        hidden_states=traced.hidden_states,
        graphs={},
        tools=tool_versions(),
    )


def _step_graphs(exported: VerifierExport, gathers: bool, folder: Path) -> dict[str, GraphRecord]:
    """Write the graphs that a device runs between engine calls. gathers: True if a drafter reads hidden states."""
    from redraft.export.graph.step_graphs import export_step_graphs

    files = export_step_graphs(exported.shape, folder, gathers)
    of_graphs = signatures.step_signatures(exported.shape, gathers)
    return {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}
