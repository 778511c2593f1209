"""The text of a run: its corpora, their token streams, and the record of them in the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from redraft.errors import UsageError
from redraft.train.checkpoint import NAME
from redraft.train.config import Recipe
from redraft.train.data import Corpus, Document, load_corpus

DATA = "data.json"


def load_corpora(sources: Mapping[str, str], recipe: Recipe) -> dict[str, Corpus]:
    """Return every kind's corpus. Raises UsageError if the kinds differ from the recipe's weights."""
    if set(sources) != set(recipe.weights):
        raise UsageError(
            f"--data gives {sorted(sources)}, the recipe has weights for {sorted(recipe.weights)}",
            "give one --data KIND=SOURCE for each",
        )
    return {kind: load_corpus(kind, sources[kind], recipe.held_out_every) for kind in sorted(sources)}


def refuse_run(out: Path) -> None:
    """Raise UsageError if a run's checkpoint would be overwritten."""
    if (out / NAME).exists():
        raise UsageError(f"{out} already holds a run", "give --resume or another --out")


def data_digest(corpora: Mapping[str, Corpus]) -> str:
    """Return the SHA-256 over every kind's corpus."""
    return hashlib.sha256("".join(f"{k}:{c.digest()}" for k, c in corpora.items()).encode()).hexdigest()


def facts_of(corpus: Corpus, tokens: int) -> dict[str, Any]:
    """Return a run folder's record of a kind: the size of its training side, and the held-out documents."""
    return {
        "documents": len(corpus.train),
        "characters": sum(len(d.text) for d in corpus.train),
        "tokens": tokens,
        "held_out": [d.name for d in corpus.held_out],
    }


def data_facts(out: Path) -> dict[str, Any]:
    """Return the record that a run wrote of each kind: documents, characters, tokens, held-out names."""
    facts: dict[str, Any] = json.loads((out / DATA).read_text(encoding="utf-8"))
    return facts


def token_stream(
    tokenizer: Tokenizer, documents: Sequence[Document], seed: int, eos: int | None, dtype: type[np.integer[Any]]
) -> NDArray[Any]:
    """Return the tokens of all documents, one after the other, in a random order by `seed`."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(documents))
    encoded = encode_documents(tokenizer, [documents[i] for i in order], eos)
    return np.concatenate([np.array(document, dtype) for document in encoded])


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document], eos: int | None) -> list[list[int]]:
    """Return token ids of every document, from BOS (if the tokenizer adds one) through EOS (if there is one)."""
    encodings: list[Any] = tokenizer.encode_batch_fast([d.text for d in documents])
    return [[*encoding.ids, *([] if eos is None else [eos])] for encoding in encodings]
