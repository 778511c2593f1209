"""The verifier's training from sources to a finished run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from experiments.tiny.objective import VerifierObjective
from experiments.tiny.recipe import VerifierRecipe
from experiments.tiny.tokenizer import EOS_ID, train_tokenizer
from redraft.errors import TrainingError, UsageError
from redraft.names import TOKENIZER_FILE
from redraft.train.batches import BatchPlan
from redraft.train.data import DATA, Corpus, data_digest, facts_of, load_corpora, token_stream
from redraft.train.loop import StepReport, refuse_run, train


def train_verifier(
    sources: Mapping[str, str],
    out: Path,
    recipe: VerifierRecipe,
    *,
    device: str = "cpu",
    compile_graph: bool = False,
    resume: bool = False,
    checkpoint_every: int = 100,
    report: Callable[[StepReport], None] = lambda _: None,
) -> int:
    """Train, or continue training, in the run folder `out`; returns the number of steps run now.

    The folder gets tokenizer.json, the token streams and data.json at the start, and checkpoint.pt as training goes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here", "use --device cpu")
    corpora = load_corpora(sources, recipe)
    identity = data_digest(corpora)
    if not resume:
        refuse_run(out)
        prepare(corpora, out, recipe)
    streams = {kind: load_stream(out, kind) for kind in corpora}
    recipe = recipe.for_epoch(sum(map(len, streams.values())) / recipe.batch_tokens)
    torch.manual_seed(recipe.seed)
    objective = VerifierObjective(recipe, compile_graph).to(device)
    plan = BatchPlan(streams, recipe.weights, recipe.seed, objective.lookahead)
    return train(
        objective,
        plan,
        recipe,
        out,
        identity=identity,
        resume=resume,
        checkpoint_every=checkpoint_every,
        report=report,
    )


def prepare(corpora: Mapping[str, Corpus], out: Path, recipe: VerifierRecipe) -> None:
    """Train the tokenizer on the training side and write it, each kind's token stream and the split's names."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([c.train for c in corpora.values()], recipe.model.vocab_size, recipe.seed)
    if tokenizer.get_vocab_size() > recipe.model.vocab_size:
        raise UsageError(f"vocab_size {recipe.model.vocab_size} is too small for bytes and special tokens")
    tokenizer.save(str(out / TOKENIZER_FILE))
    write_streams(corpora, tokenizer, out, recipe.seed)


def write_streams(corpora: Mapping[str, Corpus], tokenizer: Tokenizer, out: Path, seed: int) -> None:
    """Write the token stream of each kind's training side, and the split's names."""
    facts = {}
    for kind, corpus in corpora.items():
        stream = token_stream(tokenizer, corpus.train, seed, EOS_ID, np.uint16)
        np.save(out / f"{kind}.npy", stream)
        facts[kind] = facts_of(corpus, len(stream))
    (out / DATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_stream(out: Path, kind: str) -> NDArray[np.uint16]:
    """Return a kind's token stream of a run. Raises TrainingError if it is missing."""
    try:
        stream: NDArray[np.uint16] = np.load(out / f"{kind}.npy")
    except (FileNotFoundError, ValueError):
        raise TrainingError(f"{out} has no token stream of {kind}", "start again without --resume") from None
    return stream
