"""The verifier of a bundle during its build: one trace for all precisions, and products that meet their target."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from redraft import names, signatures
from redraft.assembly.precisions import ROUNDS, TARGETS, describe_choice, describe_target, misses, raised
from redraft.assembly.progress import MEASURE, REFERENCE, STATES, TRACE, WEIGHTS, BuildProgress
from redraft.assembly.quality import Reference, Texts, measure_quality, run_reference
from redraft.assembly.resolve import ResolvedBuild
from redraft.config import BuildConfig
from redraft.engines import Bundle
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.errors import UsageError
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.names import TOKENIZER_FILE

if TYPE_CHECKING:
    from redraft.export.quantization.product_forms import ProductPlan
    from redraft.export.verifier import TracedVerifier, VerifierExport


STATE_TOKENS, STATE_WINDOW = 6144, 512
"""Tokens of text whose hidden states are computed, and the length of its parts."""


@dataclass
class SharedWork:
    """Results that builds of one checkpoint share: traces, and the pass of the model in fp32.

    builds: they differ in precision.   scratch: a folder that lasts as long as they do.
    moment: second moment of the final hidden states, if a drafter's head is factorized.
    """

    builds: Sequence[ResolvedBuild]
    scratch: Path
    traces: dict[tuple[Any, ...], TracedVerifier] = field(default_factory=dict)
    reference: Reference | None = None
    moment: NDArray[np.float64] | None = None

    def trace(
        self, checkpoint: AnyCheckpoint, config: BuildConfig, progress: BuildProgress, layers: int | None = None
    ) -> TracedVerifier:
        """Return the traced graph; with `layers`, of the first layers only."""
        from redraft.export import quiet_export
        from redraft.export.verifier import trace_verifier

        key = (config.compute_dtype, config.hidden_states, config.max_model_len, config.random_weights, layers)
        if key not in self.traces:
            quiet_export()
            with progress.stage(TRACE):
                self.traces[key] = trace_verifier(checkpoint, config, layers=layers)
        return self.traces[key]

    def run_reference(
        self, build: ResolvedBuild, traced: TracedVerifier, folder: Path, progress: BuildProgress
    ) -> Reference | None:
        """Run the model in fp32 over the texts, unless a build of another precision has. folder: has the tokenizer."""
        from redraft.runtime.text.tokenizer import load_tokenizer

        if not build.texts or build.config.for_tensorrt:
            return None
        if self.reference is None:
            tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
            encoded = {kind: tokenizer.encode(text).ids for kind, text in build.texts.items()}
            texts = Texts.of(encoded, build.tokens, traced.decoder.shape.max_positions)
            plans = [plan for each in self.builds if (plan := first_plan(each.config, traced)) is not None]
            with progress.stage(REFERENCE) as done:
                self.reference = run_reference(traced, texts, plans, self.scratch, done)
        return self.reference

    def second_moment(
        self, build: ResolvedBuild, traced: TracedVerifier, folder: Path, progress: BuildProgress
    ) -> NDArray[np.float64] | None:
        """Return that of the hidden states on `build.state_texts`, None without any. folder: has the tokenizer."""
        from redraft.export.reference import second_moment
        from redraft.runtime.text.tokenizer import load_tokenizer

        if build.state_texts and self.moment is None:
            tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
            encoded = [tokenizer.encode(text).ids for text in build.state_texts.values()]
            with progress.stage(STATES) as done:
                self.moment = second_moment(traced, windows(encoded, traced.decoder.shape.max_positions), done)
        return self.moment


def windows(texts: Sequence[Sequence[int]], longest: int) -> list[Sequence[int]]:
    """Return parts of one length of texts of token ids, as many of each text: STATE_TOKENS in all, or what they have.

    longest: largest length of a part.
    """
    length = min(STATE_WINDOW, longest, *map(len, texts))
    most = max(1, STATE_TOKENS // (length * len(texts)))
    return [
        text[start : start + length]
        for text in texts
        for start in range(0, len(text), length)[: min(most, len(text) // length)]
    ]


def first_plan(config: BuildConfig, traced: TracedVerifier) -> ProductPlan | None:
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


def write_measured(
    config: BuildConfig, traced: TracedVerifier, staged: Bundle, reference: Reference | None, progress: BuildProgress
) -> tuple[VerifierExport, Manifest]:
    """Write and measure the verifier, with more bits for some products until it meets the precision's target.

    staged: the folder, and a manifest without graphs. Returns the manifest with them, and the quality.
    """
    manifest, plan = staged.manifest, first_plan(config, traced)
    if plan is not None and reference is not None:
        plan = replace(plan, smoothing=reference.calibrations[plan.precision].smoothing)
    for again in range(ROUNDS + 1):
        with progress.stage(WEIGHTS) as done:
            exported, graphs = write_verifier(config, traced, staged.path, done, plan)
        manifest = replace(manifest, graphs=graphs, weights=exported.weights, shape=exported.shape)
        if reference is None:
            break
        with progress.stage(MEASURE) as done:
            quality = measure_quality(Bundle(staged.path, manifest), reference, done)
        manifest = replace(manifest, quality=quality)
        if plan is None:
            break
        calibration = reference.calibrations[config.precision]
        target = TARGETS[config.precision] if config.target is None else config.target
        choices = describe_choice(plan, traced.products, calibration)
        manifest = replace(manifest, choices=(describe_target(config.precision, quality, target), *choices))
        if again == ROUNDS or not misses(quality, target):
            break
        better = raised(plan, traced.products, traced.source, calibration, quality, target)
        if better.bits == plan.bits:
            break
        progress.say(f"{config.precision} misses its target: {len(better.bits)} weights get more bits")
        plan = better
    return exported, manifest


def write_verifier(
    config: BuildConfig,
    traced: TracedVerifier,
    folder: Path,
    done: Callable[[int, int], None] = lambda part, whole: None,
    plan: ProductPlan | None = None,
) -> tuple[VerifierExport, Mapping[str, GraphRecord]]:
    """Write weights, the portable graph, and graphs lowered to CPU kernels: for any batch, and for one sequence.

    done: receives the part that is done, and the whole.
    """
    from redraft.engines.lowering import lower_operators, lower_packed, lower_single
    from redraft.export import verifier

    exported = verifier.write_verifier(traced, folder, config, lambda stage, part, whole: done(part, whole), plan)
    outputs = signatures.verifier_outputs(exported.shape, exported.hidden_states)
    portable = GraphRecord(exported.graph, signatures.verifier_inputs(exported.shape), outputs)
    graphs = {names.VERIFIER: portable}
    if exported.shape.dtype == "float32":
        lowered = {
            names.VERIFIER_BATCH: lower_packed(folder, portable),
            names.VERIFIER_SINGLE: lower_single(folder, portable),
            names.VERIFIER_FAST: lower_single(folder, portable, exact=False),
            names.VERIFIER_OPERATORS: lower_operators(folder, portable),
        }
        graphs |= {name: record for name, record in lowered.items() if record is not None}
    return exported, graphs
