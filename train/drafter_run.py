"""A drafter's training from a verifier and documents to a finished run folder.

run.json             method, configuration, verifier and data digests (RunFacts)
data.json            kinds: documents, tokens of every stream, names of held-out documents
                     coverage: share of the tokens in the most frequent ones, by size of a draft vocabulary
texts/               token streams and rows that the verifier wrote
token_counts.npy     int64 [V], over all streams
progress.jsonl       step, losses, held-out acceptance and draft logit scale, a line each measurement
checkpoint.pt        the loop's checkpoint
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from redraft.errors import UsageError
from redraft.export.drafters.layer import DrafterConfig
from redraft.files import write_json
from redraft.records import to_plain
from redraft.train.batches import Batch, BatchSource, KeptStates
from redraft.train.data import DATA
from redraft.train.distillation import Distillation
from redraft.train.document_text import DocumentText
from redraft.train.draft_columns import DraftColumns, coverage
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.loop import refuse_run, train
from redraft.train.objectives import find_training
from redraft.train.progress import PROGRESS, DrafterLog, ProgressReport
from redraft.train.states import States
from redraft.train.text_batches import WrittenText
from redraft.train.trained_drafter import RunFacts, TrainedDrafter
from redraft.train.training import Start, Training
from redraft.train.verifier_model import VerifierModel, autocast_of, check_device, open_verifier

TEXTS = "texts"
COUNTS = "token_counts.npy"


def train_drafter(  # noqa: PLR0913 - the options of a command
    method_name: str,
    verifier: Path,
    sources: Mapping[str, str],
    out: Path,
    recipe: DrafterRecipe,
    *,
    texts: Path | None = None,
    kept: Path | None = None,
    start: Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    compile_graph: bool = False,
    resume: bool = False,
    checkpoint_every: int = 100,
    report: ProgressReport | None = None,
) -> int:
    """Train, or continue training, in the run folder `out`. Returns the number of steps run now.

    sources: documents by kind.   texts: a folder of `redraft train text`, instead of documents.
    kept:    a folder for the texts that the verifier writes and its states of the documents, which runs with equal
             `self_text` may share; by default texts are in the run's own, and states are computed at every step.
    start:   a run's or a published drafter to begin with, instead of the recipe's `init`.
    dtype:   of the verifier and of products; see `open_verifier`.
    Texts are written first. A run that was interrupted at its start uses its texts again. Raises UsageError, DataError,
    CheckpointError, UnsupportedModelError or TrainingError, each naming the problem.
    """
    check_device(device)
    if not resume:
        refuse_run(out)
    training = find_training(method_name)
    report = report or ProgressReport(Console(quiet=True))
    loaded = open_verifier(verifier, device, dtype)
    config = training.configure(recipe, loaded)
    fill, digest = _start(start, training, recipe, config, loaded)
    material: DocumentText | WrittenText
    if texts is None:
        material = DocumentText(kept or out / TEXTS, loaded, recipe, sources, report.writing)
    else:
        material = WrittenText(texts, recipe, training.loss.hidden_states_of(config))
        if material.computed_again:
            report.note(material.computed_again)
    recipe = material.recipe
    facts = RunFacts(method_name, to_plain(config), loaded.identity, material.digest, material.settings, digest)
    _begin(out, facts, resume, drops_texts=texts is None and kept is None)
    lookahead = training.loss.lookahead_of(config, recipe.drafter)
    material.check(loaded, lookahead)
    plan = material.plan(lookahead)
    counts = material.counts(loaded.vocab_size)
    if not resume:
        write_json(out / DATA, {"kinds": material.facts(), "coverage": coverage(counts)})
        np.save(out / COUNTS, counts)
    torch.manual_seed(recipe.seed)
    objective = training.loss(loaded.model, config, recipe.drafter, draft_vocabulary(config, counts), compile_graph)
    objective.count(torch.from_numpy(counts))
    recipe = recipe.for_epoch(material.batches)
    if kept is not None and texts is None:
        plan = _with_states(plan, kept, recipe.seed, facts, objective)
    if fill and not resume:
        fill(objective.drafter, loaded, (plan.batch(step, recipe) for step in range(recipe.steps)))
    objective.to(device)
    held_out = material.held_out(objective.lookahead)
    log = DrafterLog(out / PROGRESS, objective, held_out, recipe, report, training.measures)
    ran = train(
        objective, plan, recipe, out, identity=facts.digest(), resume=resume, checkpoint_every=checkpoint_every,
        report=log,
    )  # fmt: skip
    log.finish(recipe.steps)
    return ran


def _with_states(plan: BatchSource, kept: Path, seed: int, facts: RunFacts, objective: Distillation) -> KeptStates:
    """Return the plan's batches with the verifier's states, kept in a folder of this order and these hidden states."""
    verifier, hidden_states = objective.verifier, objective.hidden_states

    def compute(batch: Batch) -> States:
        with autocast_of(verifier):
            return objective.states(batch.to(verifier.device))

    about = {"verifier": asdict(facts.verifier), "products": str(verifier.dtype), "documents": facts.data}
    name = f"states.{seed}.{objective.lookahead}.{'-'.join(hidden_states)}"  # rows end with the tokens to predict
    return KeptStates(plan, kept / name, about, hidden_states, compute)


def _start(
    start: Path | None, training: Training, recipe: DrafterRecipe, config: DrafterConfig, verifier: VerifierModel
) -> tuple[Start | None, str]:
    """Return the function that fills a fresh drafter, None for random numbers, and the digest of a drafter `start`."""
    if start is not None:
        trained = TrainedDrafter.open(start)
        trained.check_begins(config, verifier)
        return trained.begin, trained.digest()
    init = recipe.drafter.init
    if init != "random" and init not in training.starts:
        known = ", ".join(map(repr, ("random", *training.starts)))
        raise UsageError(f"drafter.init = {init!r} is not possible for {recipe.method}", f"use one of {known}")
    return training.starts.get(init), ""


def draft_vocabulary(config: DrafterConfig, counts: NDArray[np.int64]) -> DraftColumns:
    """Return the drafter's vocabulary: the most frequent tokens by counts [V], or all."""
    if not config.draft_vocab_size:
        return DraftColumns.whole(config.vocab_size)
    return DraftColumns.most_frequent(counts, config.draft_vocab_size)


def _begin(out: Path, facts: RunFacts, resume: bool, drops_texts: bool) -> None:
    """Make the folder this run's. `drops_texts` drops the texts of another run that wrote no checkpoint."""
    if resume:
        facts.check_same(out)
    elif RunFacts.read(out) != facts:
        out.mkdir(parents=True, exist_ok=True)
        if drops_texts:
            shutil.rmtree(out / TEXTS, ignore_errors=True)
        facts.write(out)
