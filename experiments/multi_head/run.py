"""The variant's training from sources to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from experiments.multi_head.objective import JointObjective
from experiments.multi_head.recipe import VariantRecipe
from experiments.tiny.run import load_stream, write_streams
from redraft.errors import UsageError
from redraft.names import TOKENIZER_FILE
from redraft.train.batches import BatchPlan
from redraft.train.data import data_digest, load_corpora
from redraft.train.loop import StepReport, load_checkpoint, refuse_run, train


def train_variant(
    sources: Mapping[str, str], start: Path, out: Path, recipe: VariantRecipe, *, resume: bool = False,
    checkpoint_every: int = 25, report: Callable[[StepReport], None] = lambda _: None,
) -> int:  # fmt: skip
    """Train, or continue training, in the run folder `out`, from the verifier `start`. Returns the steps run now.

    The folder gets the token streams and data.json at the start, and checkpoint.pt as training goes.
    """
    if not (start / TOKENIZER_FILE).is_file():
        raise UsageError(f"{start} has no {TOKENIZER_FILE}", "give --start a folder like assets/tiny")
    corpora = load_corpora(sources, recipe)
    if not resume:
        refuse_run(out)
        out.mkdir(parents=True, exist_ok=True)
        write_streams(corpora, Tokenizer.from_file(str(start / TOKENIZER_FILE)), out, recipe.seed)
    streams = {kind: load_stream(out, kind) for kind in corpora}
    recipe = recipe.for_epoch(sum(map(len, streams.values())) / recipe.batch_tokens)
    torch.manual_seed(recipe.seed)
    objective = JointObjective(start, recipe)
    plan = BatchPlan(streams, recipe.weights, recipe.seed, objective.lookahead)
    identity = data_digest(corpora)
    return train(
        objective, plan, recipe, out, identity=identity, resume=resume, checkpoint_every=checkpoint_every, report=report
    )


def load_run(run: Path, start: Path) -> tuple[JointObjective, VariantRecipe, int]:
    """Return the trained modules of a run folder, their recipe and their step. `start` gives the verifier's shape."""
    state = load_checkpoint(run)
    recipe = VariantRecipe.from_dict(state["recipe"], str(run))
    objective = JointObjective(start, recipe)
    objective.load_state_dict(state["objective"])
    return objective.eval(), recipe, int(state["step"])
