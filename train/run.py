"""A verifier's training, from sources to a finished run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redraft.errors import TrainingError, UsageError
from redraft.train.batches import BatchPlan
from redraft.train.checkpoint import NAME
from redraft.train.config import Recipe, VerifierRecipe
from redraft.train.data import Corpus, Document, load_corpus
from redraft.train.loop import StepReport, train
from redraft.train.tokenizer import EOS_ID, encode_documents, train_tokenizer
from redraft.train.verifier import VerifierObjective

TOKENIZER = "tokenizer.json"
DATA = "data.json"


def load_corpora(sources: Mapping[str, str], recipe: Recipe) -> dict[str, Corpus]:
    """Return every kind's corpus. Raises UsageError if the kinds differ from the recipe's weights."""
    if set(sources) != set(recipe.weights):
        raise UsageError(
            f"--data gives {sorted(sources)}, the recipe has weights for {sorted(recipe.weights)}",
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
    """Train, or continue training, in the run folder `out`. Returns the number of steps run now.

    The folder gets tokenizer.json, the token streams and data.json at the start, and checkpoint.pt during training.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here", "use --device cpu")
    corpora = load_corpora(sources, recipe)
    identity = data_digest(corpora)
    if not resume:
        refuse_run(out)
        prepare(corpora, out, recipe)
    streams = {kind: _load_stream(out, kind) for kind in corpora}
    recipe = recipe.for_data(sum(map(len, streams.values())))
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


def refuse_run(out: Path) -> None:
    """Raise UsageError if a run's checkpoint would be overwritten."""
    if (out / NAME).exists():
        raise UsageError(f"{out} already holds a run", "give --resume or another --out")


def data_digest(corpora: Mapping[str, Corpus]) -> str:
    """Return the SHA-256 over every kind's corpus."""
    return hashlib.sha256("".join(f"{k}:{c.digest()}" for k, c in corpora.items()).encode()).hexdigest()


def prepare(corpora: Mapping[str, Corpus], out: Path, recipe: VerifierRecipe) -> None:
    """Train the tokenizer on the training side. Write it, each kind's token stream and the split's names."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([c.train for c in corpora.values()], recipe.model.vocab_size, recipe.seed)
    if tokenizer.get_vocab_size() > recipe.model.vocab_size:
        raise UsageError(f"vocab_size {recipe.model.vocab_size} is too small for bytes and special tokens")
    tokenizer.save(str(out / TOKENIZER))
    facts = {}
    for kind, corpus in corpora.items():
        stream = token_stream(tokenizer, corpus.train, recipe.seed, EOS_ID, np.uint16)
        np.save(out / f"{kind}.npy", stream)
        facts[kind] = facts_of(corpus, len(stream))
    (out / DATA).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def facts_of(corpus: Corpus, tokens: int) -> dict[str, Any]:
    """Return a run folder's record of a kind: the size of its training side, and the held-out documents."""
    return {
        "documents": len(corpus.train),
        "characters": sum(len(d.text) for d in corpus.train),
        "tokens": tokens,
        "held_out": [d.name for d in corpus.held_out],
    }


def data_facts(out: Path) -> dict[str, Any]:
    """Return the record that `prepare` wrote of each kind: documents, characters, tokens, held-out names."""
    facts: dict[str, Any] = json.loads((out / DATA).read_text(encoding="utf-8"))
    return facts


def token_stream(
    tokenizer: Tokenizer, documents: Sequence[Document], seed: int, eos: int | None, dtype: type[np.integer[Any]]
) -> NDArray[Any]:
    """Return the tokens of all documents, one after the other, in a random order by `seed`."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(documents))
    encoded = encode_documents(tokenizer, [documents[i] for i in order], eos)
    return np.concatenate([np.array(document, dtype) for document in encoded])


def _load_stream(out: Path, kind: str) -> NDArray[np.uint16]:
    try:
        stream: NDArray[np.uint16] = np.load(out / f"{kind}.npy")
    except (FileNotFoundError, ValueError):
        raise TrainingError(f"{out} has no token stream of {kind}", "start again without --resume") from None
    return stream
