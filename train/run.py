"""A verifier's training from sources to a finished run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redraft.errors import TrainingError, UsageError
from redraft.train.batches import BatchPlan
from redraft.train.config import VerifierRecipe
from redraft.train.data import Corpus, load_corpus
from redraft.train.loop import StepReport, train
from redraft.train.tokenizer import encode_documents, train_tokenizer
from redraft.train.verifier import VerifierObjective

TOKENIZER = "tokenizer.json"
DATA = "data.json"


def load_corpora(sources: Mapping[str, str], recipe: VerifierRecipe) -> dict[str, Corpus]:
    """Every kind's corpus; raises UsageError when the kinds are not those of the recipe's weights."""
    if set(sources) != set(recipe.weights):
        raise UsageError(
            f"--data gives {sorted(sources)}, the recipe's weights want {sorted(recipe.weights)}",
            "give one --data KIND=SOURCE for each",
        )
    return {kind: load_corpus(kind, sources[kind], recipe.held_out_every) for kind in sorted(sources)}


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
    """Train, or go on training, in the run folder `out`; returns the number of steps run now.

    The folder gets tokenizer.json, the token streams and data.json at the start, and checkpoint.pt as training goes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here", "use --device cpu")
    corpora = load_corpora(sources, recipe)
    identity = hashlib.sha256("".join(f"{k}:{c.digest()}" for k, c in corpora.items()).encode()).hexdigest()
    if not resume:
        if (out / "checkpoint.pt").exists():
            raise UsageError(f"{out} holds a run already", "give --resume or another --out")
        prepare(corpora, out, recipe)
    streams = {kind: _load_stream(out, kind) for kind in corpora}
    torch.manual_seed(recipe.seed)
    objective = VerifierObjective(recipe, compile_graph).to(device)
    plan = BatchPlan(streams, recipe.weights, recipe.seed)
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
    tokenizer.save(str(out / TOKENIZER))
    facts = {}
    for kind, corpus in corpora.items():
        stream = np.concatenate([np.array(d, np.uint16) for d in _shuffled(tokenizer, corpus, recipe.seed)])
        np.save(out / f"{kind}.npy", stream)
        facts[kind] = {
            "documents": len(corpus.train),
            "characters": sum(len(d.text) for d in corpus.train),
            "tokens": len(stream),
            "held_out": [d.name for d in corpus.held_out],
        }
    (out / DATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def data_facts(out: Path) -> dict[str, Any]:
    """What `prepare` noted of each kind: documents, characters, tokens, names of the held-out documents."""
    facts: dict[str, Any] = json.loads((out / DATA).read_text(encoding="utf-8"))
    return facts


def _shuffled(tokenizer: Tokenizer, corpus: Corpus, seed: int) -> list[list[int]]:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(corpus.train))
    return encode_documents(tokenizer, [corpus.train[i] for i in order])


def _load_stream(out: Path, kind: str) -> NDArray[np.uint16]:
    try:
        stream: NDArray[np.uint16] = np.load(out / f"{kind}.npy")
    except (FileNotFoundError, ValueError):
        raise TrainingError(f"{out} has no token stream of {kind}", "start again without --resume") from None
    return stream
