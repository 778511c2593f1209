"""Builds an engine bundle from a checkpoint: graph, lowering, tokenizer, perplexity, manifest, then one rename."""

from __future__ import annotations

import fnmatch
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redraft.engines
import redraft.export
import redraft.methods
from redraft import names, signatures
from redraft.assembly import tokenizers
from redraft.assembly.drafters import check_drafters, drafter_digests, resolve_drafters, stage_drafters
from redraft.assembly.models import Model, Report
from redraft.assembly.options import options_of
from redraft.assembly.preflight import check_file, check_room
from redraft.assembly.progress import BuildProgress
from redraft.assembly.quality import DEFAULT_TOKENS, Reference, Texts, measure_quality, run_reference
from redraft.assembly.self_check import check_bundle, check_graphs_agree, known_texts
from redraft.config import RANDOM, WEIGHT_ONLY, BuildConfig
from redraft.engines import Bundle, BundleWriter
from redraft.engines.cache import build_key, code_digests, is_current
from redraft.engines.digests import DigestCache, text_digest
from redraft.engines.host_memory import available_bytes
from redraft.engines.manifest import GraphRecord, Manifest, ModelIdentity, load_manifest
from redraft.engines.tensorrt.tools import find_tools
from redraft.errors import BackendError, UsageError
from redraft.export import quiet_export
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from redraft.garbage import libraries_kept
from redraft.interrupts import interrupts_deferred
from redraft.names import TOKENIZER_FILE
from redraft.packages import package_version

if TYPE_CHECKING:
    from redraft.export.quantization.product_forms import ProductPlan
    from redraft.export.verifier import TracedVerifier, VerifierExport

TOOLS = (
    "redraft", "torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "gguf",
)  # fmt: skip
SPARE_BYTES = 16 << 20
GIB = 1 << 30
CHECKED_NUMBERS = 1_000_000_000
"""Weights of the largest model that is checked whole. Only the first layers of larger models are checked."""
COPIES = 2
"""Copies of the fp32 weights in memory while a whole model is checked: the engine's, and its packed ones."""


@dataclass
class SharedWork:
    """What builds of one model share: the trace, and the pass of the model in fp32, which measures all their products.

    configs: of the builds, which differ in precision.
    """

    configs: Sequence[BuildConfig]
    scratch: Path
    traced: dict[tuple[Any, ...], TracedVerifier] = field(default_factory=dict)
    reference: Reference | None = None


@contextmanager
def shared_work(configs: Sequence[BuildConfig]) -> Iterator[SharedWork]:
    """Yield work to share between builds. Files of it are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        yield SharedWork(configs, Path(folder))


def build_bundle(
    model: Model, config: BuildConfig, out: Path, texts: Mapping[str, str], force: bool, report: Report,
    check: bool = True, tokens: int = DEFAULT_TOKENS, shared: SharedWork | None = None,
) -> tuple[Manifest, bool]:  # fmt: skip
    """Build the bundle `out`, unless it is current.

    check: compare the engines with their reference before the final rename.
    texts: held-out text by kind, for the quality in the manifest and for calibration; not used for random weights.
    tokens: number of the texts' tokens to measure.   shared: work of builds of the same model in other precisions.
    Returns the manifest, and True if the bundle was current.
    Raises CheckpointError, UnsupportedModelError, BundleError.
    """
    if shared is None:
        with shared_work([config]) as alone:
            return build_bundle(model, config, out, texts, force, report, check, tokens, alone)
    report("reading the checkpoint")
    checkpoint = open_checkpoint(model.path, weights=not config.random_weights)
    check_file(checkpoint)
    digests = _digests(checkpoint)
    texts = {} if config.random_weights else texts
    shape = {"shape": text_digest(json.dumps(dict(model.shape), sort_keys=True)), "tokens": str(tokens)}
    tools = find_tools(config) if config.for_tensorrt else None
    checked = {} if check else {"check": "skipped"}
    key = _key(
        digests | drafter_digests(config, checkpoint) | shape | checked | (tools.digests() if tools else {}),
        config,
        texts,
    )
    if not force and is_current(out, key):
        return load_manifest(out), True
    with BuildProgress(report) as progress, ExitStack() as stack:
        with progress.stage(LIBRARIES):  # which a current bundle must not wait for
            expected = _expected_seconds(checkpoint, config, texts, check, tokens)
            expected |= {TRACE: 0.0} if shared.traced else {}
            expected |= {REFERENCE: 0.0} if shared.reference else {}
            progress.expect(expected)
            config = resolve_drafters(config, checkpoint)
            check_drafters(config, checkpoint, digests)
            check_room(checkpoint, config, out, measured=tokens if texts else 0)
            writer = stack.enter_context(BundleWriter(out, model.name, force, config.random_weights))
            writer.reserve(_needed_bytes(checkpoint, config, writer.staging))
            _load_libraries()
        build = _Build(checkpoint, digests, model, config, writer.staging, progress, shared)
        manifest = build.stage(texts, tokens)
        weights = {name: digests[name] for name in checkpoint.files}
        options = (*model.options, *options_of(model.build, config))
        manifest = replace(manifest, build_key=key, options=options, model=replace(manifest.model, weights=weights))
        if check and not config.random_weights:
            _check(build, Bundle(writer.staging, manifest), out)
        if tools:
            from redraft.engines.tensorrt.stage import stage_engines

            manifest = stage_engines(writer.staging, manifest, config.tensorrt, tools, progress.say)
        with progress.stage(WRITE):
            return writer.commit(manifest), False


LIBRARIES, TRACE, REFERENCE, WEIGHTS, MEASURE, DRAFTERS, CHECK, WRITE = (
    "loading libraries", "tracing the model", "running the model in fp32", "writing weights", "measuring quality",
    "building drafters", "checking engines", "finishing the bundle",
)  # fmt: skip
"""Stages of a build, in order."""


def _expected_seconds(
    checkpoint: AnyCheckpoint, config: BuildConfig, texts: Mapping[str, str], check: bool, tokens: int
) -> dict[str, float]:
    """Return the expected seconds of each stage on two cores, from the sizes of the work."""
    layers = int(checkpoint.config.get("num_hidden_layers") or 24)
    billions = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values()) / 1e9
    rounded = config.rounds_products
    measured = bool(texts) * tokens / 1000
    return {
        LIBRARIES: 9,
        TRACE: 2 + 0.6 * layers,
        REFERENCE: measured * (2 + 22 * billions),
        WEIGHTS: 1 + (8 if rounded else 1) * billions,
        MEASURE: measured * (2 + 14 * billions),
        DRAFTERS: 8.0 * len(config.drafters),
        CHECK: check * (5 + 6 * billions if rounded else 10 + 10 * billions),
        WRITE: 1 + 3 * billions,
    }


def _load_libraries() -> None:
    """Import PyTorch and its users, which takes a second or two and must not be interrupted."""
    if "redraft.export.verifier" in sys.modules:
        return
    with interrupts_deferred(), libraries_kept():
        import redraft.export.verifier
        import redraft.export.weights  # noqa: F401


@dataclass
class _Build:
    """One build: its inputs, and the folder that gets its files."""

    checkpoint: AnyCheckpoint
    digests: Mapping[str, str]
    model: Model
    config: BuildConfig
    folder: Path
    progress: BuildProgress
    shared: SharedWork
    layers: int | None = None

    def traced(self) -> TracedVerifier:
        """Return the traced graph, of the first `layers` layers if they are given."""
        from redraft.export.checkpoint import model_config
        from redraft.export.verifier import trace_verifier

        config = self.config
        key = (config.compute_dtype, config.hidden_states, config.max_model_len, config.random_weights, self.layers)
        if key not in self.shared.traced:
            architecture = model_config.load_config(self.checkpoint)
            model_config.check_shape(architecture, self.model.shape, self.model.source)
            quiet_export()
            with self.progress.stage(TRACE):
                self.shared.traced[key] = trace_verifier(self.checkpoint, config, layers=self.layers)
        return self.shared.traced[key]

    def stage(self, texts: Mapping[str, str] | None = None, tokens: int = DEFAULT_TOKENS) -> Manifest:
        """Write every file of a bundle except the manifest. Returns the manifest without digests."""
        from redraft.export.checkpoint import model_config

        checkpoint, config, folder = self.checkpoint, self.config, self.folder
        stand_in = config.random_weights and not _has_tokenizer(checkpoint)
        vocabulary = model_config.load_config(checkpoint).get_text_config(decoder=True).vocab_size
        special = tokenizers.write_stand_in(folder, vocabulary) if stand_in else _write_text(checkpoint, folder)
        traced = self.traced()
        plan = _first_plan(config, traced)
        reference = self._reference(traced, texts or {}, tokens)
        if plan is not None and reference is not None:
            plan = replace(plan, smoothing=reference.calibrations[plan.precision].smoothing)
        base = Manifest(
            name=self.model.name,
            model=ModelIdentity(
                source=self.model.source,
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
            shape=traced.decoder.shape,
            max_model_len=traced.decoder.shape.max_positions,
            bos_token_id=special.bos,
            eos_token_ids=special.eos,
            hidden_states=traced.hidden_states,
            graphs={},
            tools=_tools(),
        )
        exported, manifest = self._best(traced, base, plan, reference)
        with self.progress.stage(DRAFTERS):
            drafters = stage_drafters(checkpoint, self.digests, exported, config, folder, self.progress.say)
        steps = _step_graphs(exported, any(record.rows != "none" for record in drafters.values()), folder)
        return replace(manifest, graphs={**manifest.graphs, **steps}, drafters=drafters)

    def _reference(self, traced: TracedVerifier, texts: Mapping[str, str], tokens: int) -> Reference | None:
        """Run the model in fp32 over the texts, unless a build of another precision has."""
        from redraft.runtime.tokenizer import load_tokenizer

        if not texts or self.config.random_weights or self.config.backend != "onnxruntime":
            return None
        shared = self.shared
        if shared.reference is not None:
            return shared.reference
        tokenizer = load_tokenizer(self.folder / TOKENIZER_FILE)
        encoded = {kind: tokenizer.encode(text).ids for kind, text in texts.items()}
        chosen = Texts.of(encoded, tokens, traced.decoder.shape.max_positions)
        if chosen is None:
            return None
        plans = [plan for config in shared.configs if (plan := _first_plan(config, traced)) is not None]
        with self.progress.stage(REFERENCE) as done:
            shared.reference = run_reference(traced, chosen, plans, shared.scratch, done)
        return shared.reference

    def _best(
        self, traced: TracedVerifier, manifest: Manifest, plan: ProductPlan | None, reference: Reference | None
    ) -> tuple[VerifierExport, Manifest]:
        """Write and measure the verifier, with more bits for some products until it meets the precision's target."""
        from redraft.assembly.precisions import ROUNDS, TARGETS, describe_choice, describe_target, misses, raised

        precision = self.config.precision
        for again in range(ROUNDS + 1):
            exported, manifest = self._written(traced, manifest, plan)
            if reference is None:
                break
            with self.progress.stage(MEASURE) as done:
                quality = measure_quality(Bundle(self.folder, manifest), reference, done)
            manifest = replace(manifest, quality=quality)
            if plan is None:
                break
            found = reference.calibrations[precision]
            target = TARGETS[precision] if self.config.target is None else self.config.target
            choices = (describe_target(precision, quality, target), *describe_choice(plan, traced.products, found))
            manifest = replace(manifest, choices=choices)
            if again == ROUNDS or not misses(quality, target):
                break
            better = raised(plan, traced.products, traced.source, found, quality, target)
            if better.bits == plan.bits:
                break
            self.progress.say(f"{precision} misses its target: {len(better.bits)} weights get more bits")
            plan = better
        return exported, manifest

    def _written(
        self, traced: TracedVerifier, manifest: Manifest, plan: ProductPlan | None
    ) -> tuple[VerifierExport, Manifest]:
        """Write the verifier's weights and graphs."""
        from redraft.export.verifier import write_verifier

        with self.progress.stage(WEIGHTS) as done:
            exported = write_verifier(
                traced, self.folder, self.config, lambda stage, part, whole: done(part, whole), plan
            )
            graphs = _graphs(exported, self.folder)
        return exported, replace(manifest, graphs=graphs, weights=exported.weights)


def _first_plan(config: BuildConfig, traced: TracedVerifier) -> ProductPlan | None:
    """Return the plan with the bits that the user chose, None for a precision whose products are not rounded.

    Raises UsageError for a pattern without a weight.
    """
    from redraft.export.quantization.product_forms import ProductPlan

    if not config.rounds_products:
        return None
    parameters = [name for weight in traced.products for name in weight.parameters]
    bits: dict[str, int] = {}
    for pattern, its in config.bits:
        chosen = fnmatch.filter(parameters, pattern)
        if not chosen:
            raise UsageError(f"no product's weight has a name like {pattern!r}", f"names are such as {parameters[0]}")
        bits |= dict.fromkeys(chosen, its)
    return ProductPlan(config.precision, bits=bits, fixed=frozenset(bits))


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
    from redraft.export.graph.step_graphs import export_step_graphs

    files = export_step_graphs(exported.shape, folder, gathers)
    of_graphs = signatures.step_signatures(exported.shape, gathers)
    return {name: GraphRecord(file, *of_graphs[name]) for name, file in files.items()}


def _check(build: _Build, staged: Bundle, out: Path) -> None:
    """Compare the staged engines with their reference. Raises UnsupportedModelError if they differ.

    Engines that round their products are compared with products over the same rounded weights and inputs, and what is
    between the products with transformers' own modules. In fp32, logits must agree with transformers'. Of other
    precisions, and if memory cannot hold the fp32 engines, an fp32 export of the first layers must. Raises BackendError
    if memory is too small, since only the user may skip the comparison.
    """
    from redraft.assembly.product_check import check_products
    from redraft.export.reference import count_numbers, enough_layers, reference_logits

    progress, manifest, checkpoint = build.progress, staged.manifest, build.checkpoint
    texts = known_texts(manifest.shape.vocabulary, checkpoint.config, manifest.max_model_len)
    with progress.stage(CHECK):
        if build.config.rounds_products:
            compared = check_products(staged, build.traced(), texts[0])
            progress.say(compared.describe())
            check_graphs_agree(staged, texts)
            if compared.between:
                return
        numbers = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
        whole = numbers <= CHECKED_NUMBERS and COPIES * 4 * numbers <= (available_bytes() or 0)
        if whole and manifest.precision in ("fp32", "fp16") and manifest.backend == "onnxruntime":
            logits = reference_logits(checkpoint, texts)
            progress.say(check_bundle(staged, texts, logits, manifest.precision).describe())
            if manifest.precision == "fp32":
                return
        layers = enough_layers(checkpoint)
        needed, available = COPIES * 4 * count_numbers(checkpoint, layers), available_bytes()
        if available is not None and needed > available:
            raise BackendError(
                f"checking {layers} layers in fp32 takes {needed / GIB:.1f} GiB of memory; {available / GIB:.1f} are "
                "free",
                "free memory, or build with --skip-check",
            )
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.building-check-", dir=out.parent) as folder:
            config = BuildConfig(precision="fp32", max_model_len=manifest.max_model_len)
            first = replace(build, config=config, folder=Path(folder), layers=layers, digests={})
            compared_first = check_bundle(
                Bundle(Path(folder), first.stage()), texts, reference_logits(checkpoint, texts, layers), "fp32"
            )
            progress.say(compared_first.describe(f"the first {layers} layers in fp32"))


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
    from redraft.export.checkpoint.base import ITEM_BYTES
    from redraft.export.checkpoint.sources import LINK_FROM_BYTES
    from redraft.export.checkpoint.weight_files import STORED

    linked = set()
    dtype = STORED[config.compute_dtype]
    if config.precision not in WEIGHT_ONLY and not config.random_weights:
        files = {name: (checkpoint.path / name).stat() for name in checkpoint.files}
        device = folder.stat().st_dev
        linked = {name for name, s in files.items() if s.st_size >= LINK_FROM_BYTES and s.st_dev == device}
    copied = [e for e in checkpoint.tensors.values() if not (e.file in linked and e.dtype == dtype)]
    return sum(ITEM_BYTES[dtype] * math.prod(entry.shape) for entry in copied) + SPARE_BYTES
