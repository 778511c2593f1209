"""Documents that a drafter learns from, and the verifier's continuations of their parts.

A run's folder stores token streams, rows that the verifier wrote, and held-out rows. Every array is written whole, so
an interrupted run can continue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import DataError, UsageError
from redraft.files import whole_file
from redraft.train.acceptance import greedy_rows
from redraft.train.batches import Batch, BatchPlan, BatchSource, blocks_of
from redraft.train.data import data_digest, facts_of, load_corpora, token_stream
from redraft.train.drafter_config import DrafterRecipe, stream_name
from redraft.train.verifier_model import VerifierModel
from redraft.train.writer import write_rows

Array = NDArray[np.integer[Any]]
Progress = Callable[[str, int, int], None]
"""Name of the stream, rows written, rows in all."""
SELF = "self"
"""The only kind in a run without documents: text that the verifier writes from the first token on."""


class DocumentText:
    """The texts of a run with documents by kind; without any, the verifier writes all text.

    recipe:   the run's recipe, with a weight for every kind.   digest: of the documents.
    settings: values of the recipe that made the texts; a resumed run must have the same.
    Token ids are uint16 if the vocabulary allows it, else uint32.
    """

    def __init__(
        self, folder: Path, verifier: VerifierModel, recipe: DrafterRecipe, sources: Mapping[str, str],
        progress: Progress,
    ) -> None:  # fmt: skip
        """Read the documents of `sources`. Texts are kept in `folder`.

        Raises UsageError if the verifier cannot write all text although it must.
        """
        self.recipe = recipe = with_weights(recipe, sources)
        self._folder, self._verifier, self._progress = folder, verifier, progress
        self._corpora = load_corpora(sources, recipe) if sources else {}
        self._dtype: type[np.integer[Any]] = np.uint16 if verifier.vocab_size <= 1 << 16 else np.uint32
        if not sources and (recipe.self_text.text or verifier.bos is None):
            raise UsageError(
                "without --data all text is the verifier's own, but "
                + ("the recipe draws documents" if recipe.self_text.text else "it has no token to begin a text with"),
                "give --data KIND=SOURCE, or set self_text.text = 0" if verifier.bos is not None else "give --data",
            )
        self.digest = data_digest(self._corpora)
        values = recipe.to_dict()
        plain = {name: values[name] for name in ("self_text", "seed", "held_out_every")}
        self.settings = json.loads(json.dumps(plain | {"kinds": sorted(recipe.weights)}))

    @cached_property
    def _streams(self) -> Mapping[str, Array]:
        """Every stream of the recipe. Texts that are missing are written now."""
        return {
            stream_name(kind, source): self._stream(kind, "train") if source == "text" else self._written(kind, source)
            for kind in self.recipe.weights
            for source in self.recipe.self_text.shares()
        }

    @property
    def batches(self) -> float:
        """Batches of all streams' tokens."""
        return sum(map(len, self._streams.values())) / self.recipe.batch_tokens

    def check(self, verifier: VerifierModel, lookahead: int) -> None:
        """Raise UsageError if rows are longer than the verifier's positions."""
        recipe = self.recipe
        limit = verifier.max_positions
        text = recipe.self_text.prompt_tokens + recipe.self_text.new_tokens
        rows = max(recipe.seq_len, recipe.decay_seq_len) + lookahead
        if limit and max(text, rows) > limit:
            raise UsageError(
                f"rows of {rows} tokens (with {lookahead} to predict) and texts of {text} must fit the verifier's "
                f"{limit} positions",
                "lower seq_len, or self_text.prompt_tokens and new_tokens",
            )

    def plan(self, lookahead: int) -> BatchSource:
        """Return batches of rows of the streams. Raises DataError before writing text if a corpus is too short."""
        recipe = self.recipe
        for kind in self._corpora:
            tokens = len(self._stream(kind, "train"))
            blocks_of(kind, tokens, max(recipe.seq_len, recipe.decay_seq_len), lookahead)
        return BatchPlan(self._streams, recipe.stream_weights(), recipe.seed, lookahead)

    def held_out(self, lookahead: int) -> Mapping[str, list[Batch]]:
        """Return greedy continuations of held-out documents by kind, to measure acceptance on."""
        spec = self.recipe.self_text
        rows = {kind: self._rows(kind, "held_out", spec.held_out_rows, 0.0) for kind in self.recipe.weights}
        return {kind: greedy_rows(some, spec.prompt_tokens - 1, lookahead) for kind, some in rows.items()}

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often every token occurs in all streams, int64 [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for stream in self._streams.values():
            counts += np.bincount(stream, minlength=vocab_size)
        return counts

    def facts(self) -> dict[str, Any]:
        """Return sizes of documents and streams, and the names of held-out documents, by kind."""
        found: dict[str, Any] = {}
        for kind in self.recipe.weights:
            shares = self.recipe.self_text.shares()
            tokens = {source: len(self._streams[stream_name(kind, source)]) for source in shares}
            documents = facts_of(self._corpora[kind], tokens.get("text", 0)) if kind in self._corpora else {}
            found[kind] = {**documents, "tokens": tokens}
        return found

    def _stream(self, kind: str, side: str) -> Array:
        """Return the tokens of a kind's documents on one side of the split, `train` or `held_out`."""
        corpus, verifier = self._corpora[kind], self._verifier
        documents = corpus.train if side == "train" else corpus.held_out
        return _cached(
            self._folder / f"{kind}.{side}.npy",
            lambda: token_stream(verifier.tokenizer, documents, self.recipe.seed, verifier.eos, self._dtype),
        )

    def _written(self, kind: str, source: str) -> Array:
        """Return a stream that the verifier wrote, row after row."""
        spec = self.recipe.self_text
        rows = [self._rows(kind, "train", spec.rows, t) for t in spec.temperatures_of(source)]
        return np.concatenate(rows).reshape(-1)

    def _rows(self, kind: str, side: str, rows: int, temperature: float) -> Array:
        """Return rows that the verifier wrote, [rows, prompt_tokens + new_tokens]."""
        name = f"{kind}.{side}.{temperature:g}"
        seed = _seed(self.recipe.seed, name)

        def make() -> Array:
            written = write_rows(
                self._verifier.model, self._prompts(kind, side, rows, seed), self.recipe.self_text.new_tokens,
                temperature, seed, lambda done, of: self._progress(name, done, of),
            )  # fmt: skip
            return written.astype(self._dtype)

        return _cached(self._folder / f"{name}.rows.npy", make)

    def _prompts(self, kind: str, side: str, rows: int, seed: int) -> Array:
        """Return parts of documents; without documents, beginnings that the verifier samples."""
        length = self.recipe.self_text.prompt_tokens
        if self._corpora:
            return prompts_from(self._stream(kind, side), rows, length, seed)
        begin = np.full((rows, 1), self._verifier.bos)
        return write_rows(self._verifier.model, begin, length - 1, 1.0, _seed(seed, "prompts")) if length > 1 else begin


def with_weights(recipe: DrafterRecipe, sources: Mapping[str, str]) -> DrafterRecipe:
    """Return the recipe with a weight for every kind, if it has none."""
    if not recipe.weights:
        return replace(recipe, weights=dict.fromkeys(sorted(sources) or [SELF], 1.0))
    if not sources and set(recipe.weights) != {SELF}:
        raise UsageError(
            f"no --data, and the recipe has weights for {sorted(recipe.weights)}",
            "give one --data KIND=SOURCE for each, or --texts",
        )
    return recipe


def prompts_from(stream: Array, rows: int, length: int, seed: int) -> NDArray[np.int64]:
    """Return `rows` parts of `length` tokens from random places of a token stream, int64 [rows, length]."""
    if len(stream) <= length:
        raise DataError(f"the corpus has {len(stream)} tokens, too few for prompts of {length}")
    starts = np.random.Generator(np.random.PCG64(seed)).integers(0, len(stream) - length, rows)
    return np.stack([stream[start : start + length] for start in starts]).astype(np.int64)


def _cached(path: Path, make: Callable[[], Array]) -> Array:
    """Return the array in `path`. If it is missing, make it and write it whole."""
    if path.exists():
        try:
            found: Array = np.load(path)
        except ValueError:
            raise DataError(f"{path} is damaged", "remove it; the next run writes it again") from None
        return found
    array = make()
    with whole_file(path) as file:
        np.save(file, array)
    return array


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
