"""Variants of Lyanna's drafter that differ in one thing: the same texts, order of batches, steps and held-out rows.

OUT/texts texts that all variants learn from and are measured on, written once OUT/NAME a variant's checkpoint and its
progress; a finished variant is not trained again
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.export.drafters.checkpoint import save_drafter
from redraft.methods.lyanna import METHOD
from redraft.train.acceptance import Acceptance, greedy_rows
from redraft.train.batches import Batch, BatchPlan
from redraft.train.checkpoint import NAME
from redraft.train.data import parse_sources
from redraft.train.drafter_log import DrafterLog, measures_of, read_progress
from redraft.train.drafter_run import PROGRESS, TEXTS, draft_vocabulary
from redraft.train.loop import StepReport, train
from redraft.train.objectives import find_training
from redraft.train.objectives.lyanna import LyannaObjective
from redraft.train.progress import ProgressReport
from redraft.train.run import data_digest, load_corpora
from redraft.train.run_facts import RunFacts
from redraft.train.text_store import Array, TextStore, token_counts
from redraft.train.verifier_model import VerifierModel, open_verifier

TRAINING = find_training(METHOD.id)
POINTS = 4
"""Measurements of a run, at equal distances."""
FULL = "both"
"""The variant with token information and first token, the same in every part."""
_SECONDS_A_LINE = 20.0

Measured = list[dict[str, Any]]
"""Writes the lines of a run's progress: step, losses, acceptance by kind."""


class Lines(ProgressReport):
    """Prints progress as lines on the error stream, one every so many seconds."""

    def __init__(self) -> None:
        self.name = ""
        self._said = 0.0

    def __call__(self, report: StepReport) -> None:
        """See the base class."""
        losses = " ".join(f"{name} {value:.3f}" for name, value in report.metrics.items())
        self._print(f"{self.name}: step {report.step}/{report.steps} {losses}", report.step == report.steps)

    def writing(self, name: str, done: int, rows: int) -> None:
        """See the base class."""
        self._print(f"writing {name}: {done}/{rows} rows", done == rows)

    def acceptance(self, step: int, kinds: Mapping[str, Acceptance]) -> None:
        """See the base class."""
        for kind, found in kinds.items():
            self._print(f"{self.name}: step {step} accepted {kind} {found}", True)

    def _print(self, line: str, always: bool) -> None:
        if always or time.monotonic() - self._said > _SECONDS_A_LINE:
            print(line, file=sys.stderr, flush=True)
            self._said = time.monotonic()


@dataclass(frozen=True)
class Texts:
    """Texts and counts that all variants share.

    streams: tokens by stream.   held_out: greedy rows of every kind, whose drafts start after their prompts.
    counts: of every token, int64 [V].
    """

    out: Path
    verifier: VerifierModel
    recipe: Any
    identity: str
    streams: Mapping[str, Array]
    held_out: Mapping[str, list[Batch]]
    counts: NDArray[np.int64]
    report: Lines


def recipe_of(options: argparse.Namespace, sources: Mapping[str, str]) -> Any:
    """Return the recipe of `options` with their steps, batches and rows; kinds are those that have sources."""
    found = TRAINING.recipe.load(options.config).with_options(options.steps, options.seed)
    written = replace(found.self_text, rows=options.rows, held_out_rows=options.held_out_rows)
    return replace(
        found,
        batch_tokens=options.batch_tokens,
        weights={kind: found.weights.get(kind, 1.0) for kind in sources},
        self_text=written,
        drafter=replace(found.drafter, init=options.init or found.drafter.init),
        evaluate_every=max(1, options.steps // POINTS),
    )


def open_texts(options: argparse.Namespace) -> Texts:
    """Write the texts that `options.out` lacks, read the rest. Raises TrainingError if those are of another run."""
    torch.set_num_threads(options.threads)
    sources = parse_sources(options.data)
    recipe, out, report = recipe_of(options, sources), options.out, Lines()
    corpora = load_corpora(sources, recipe)
    verifier = open_verifier(options.verifier, "cpu")
    values = recipe.to_dict()
    texts = {name: values[name] for name in ("self_text", "seed", "held_out_every")}
    texts["self_text"] = {**texts["self_text"], "temperatures": list(recipe.self_text.temperatures)}
    data = data_digest(corpora)
    facts = RunFacts(METHOD.id, {}, verifier.identity, data, {**texts, "kinds": sorted(sources), "data": data})
    if RunFacts.read(out) is None:
        out.mkdir(parents=True, exist_ok=True)
        facts.write(out)
    facts.check_same(out)
    store = TextStore(out / TEXTS, verifier, recipe, corpora, report.writing)
    streams = store.streams(recipe.drafter.chain)
    counts = token_counts(streams, verifier.vocab_size)
    first = recipe.self_text.prompt_tokens - 1
    held_out = {kind: greedy_rows(rows, first, recipe.drafter.chain) for kind, rows in store.held_out().items()}
    return Texts(out, verifier, recipe, facts.digest(), streams, held_out, counts, report)


def train_variant(
    texts: Texts, name: str, *, token_info: bool = True, first_token: bool = True
) -> tuple[Measured, LyannaObjective]:
    """Train a variant, or read it; return its measurements, at least one, and the final objective.

    token_info, first_token: as in the recipe.
    """
    recipe = replace(
        texts.recipe, drafter=replace(texts.recipe.drafter, token_info=token_info, first_token=first_token)
    )
    folder = texts.out / name
    folder.mkdir(parents=True, exist_ok=True)
    texts.report.name = name
    torch.manual_seed(recipe.seed)
    config = TRAINING.configure(recipe, texts.verifier)
    found: Any = TRAINING.objective(texts.verifier.model, config, recipe, draft_vocabulary(config, texts.counts), False)
    plan = BatchPlan(texts.streams, recipe.stream_weights(), recipe.seed, found.lookahead)
    if recipe.drafter.init != "random":
        batches = (plan.batch(step, recipe) for step in range(recipe.steps))
        TRAINING.starts[recipe.drafter.init](found.drafter, texts.verifier, batches)
    log = DrafterLog(folder / PROGRESS, found, texts.held_out, recipe, texts.report, measures_of(TRAINING))
    train(found, plan, recipe, folder, identity=texts.identity, resume=(folder / NAME).exists(), report=log)
    measured = read_progress(folder / PROGRESS)
    if not measured:
        raise UsageError(f"{folder} has a checkpoint and no {PROGRESS}", "remove the folder; it is trained again")
    return measured, found


def publish_variant(texts: Texts, name: str, trained: LyannaObjective) -> None:
    """Write a variant's drafter to OUT/NAME/drafter, with the draft logit scale of its last measurement."""
    scale = read_progress(texts.out / name / PROGRESS)[-1]["draft_logit_scale"]
    config = replace(trained.drafter.config, draft_logit_scale=scale)
    vocabulary = None if trained.vocabulary.is_whole else trained.vocabulary.tokens
    folder, counts = texts.out / name / "drafter", torch.from_numpy(texts.counts)
    save_drafter(folder, METHOD.id, config, texts.verifier.identity, trained.drafter, counts, {}, vocabulary)


def mean_of_kinds(kinds: Mapping[str, Mapping[str, Any]], rule: str) -> list[float]:
    """Return the mean over kinds of the acceptance at every depth by one rule, `top` or `wide`."""
    return [float(np.mean(shares)) for shares in zip(*(found[rule] for found in kinds.values()), strict=True)]


def percents(shares: Sequence[float]) -> list[str]:
    """Return shares as text."""
    return [f"{100 * share:.1f} %" for share in shares]
