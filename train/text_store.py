"""The texts of a drafter's run, stored in its folder: documents, the verifier's texts, held-out rows.

Every array is written under another name and then renamed, so every file is whole and an interrupted run can continue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import DataError, UsageError
from redraft.train.batches import blocks_of
from redraft.train.data import Corpus
from redraft.train.drafter_config import DrafterRecipe, stream_name
from redraft.train.run import token_stream
from redraft.train.self_text import prompts_from, write_rows
from redraft.train.verifier_model import VerifierModel

Array = NDArray[np.integer[Any]]
Progress = Callable[[str, int, int], None]
"""Name of the stream, rows written, rows in all."""
SELF = "self"
"""The only kind in a run without documents: text that the verifier writes from the first token on."""


def cached(path: Path, make: Callable[[], Array]) -> Array:
    """Return the array in `path`. If it is missing, make it and write it whole."""
    if path.exists():
        try:
            found: Array = np.load(path)
        except ValueError:
            raise DataError(f"{path} is damaged", "remove it; the next run writes it again") from None
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    array = make()
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        np.save(file, array)
    unfinished.replace(path)
    return array


class TextStore:
    """Streams and held-out rows of a run. Token ids are uint16 if the vocabulary allows it, else uint32."""

    def __init__(
        self,
        folder: Path,
        verifier: VerifierModel,
        recipe: DrafterRecipe,
        corpora: Mapping[str, Corpus],
        progress: Progress = lambda name, done, rows: None,
    ) -> None:
        """If `corpora` is empty, all text is the verifier's. Raises UsageError if that is impossible."""
        self._folder, self._verifier, self._recipe, self._corpora = folder, verifier, recipe, corpora
        self._progress = progress
        self._dtype: type[np.integer[Any]] = np.uint16 if verifier.vocab_size <= 1 << 16 else np.uint32
        if not corpora and (recipe.self_text.text or verifier.bos is None):
            raise UsageError(
                "without --data all text is the verifier's own, but "
                + ("the recipe draws documents" if recipe.self_text.text else "it has no token to begin a text with"),
                "give --data KIND=SOURCE, or set self_text.text = 0" if verifier.bos is not None else "give --data",
            )

    def streams(self, lookahead: int) -> dict[str, Array]:
        """Return every stream of the recipe. Raises DataError before writing text if a corpus is too short."""
        recipe = self._recipe
        length = max(recipe.seq_len, recipe.decay_seq_len)
        for kind in self._corpora:
            blocks_of(kind, len(self._documents(kind)), length, lookahead)
        return {
            stream_name(kind, source): self._documents(kind) if source == "text" else self._written(kind, source)
            for kind in recipe.weights
            for source in recipe.self_text.shares()
        }

    def held_out(self) -> dict[str, Array]:
        """Return greedy rows of every kind, [rows, prompt_tokens + new_tokens], from prompts of held-out documents."""
        rows = self._recipe.self_text.held_out_rows
        return {kind: self._rows(kind, "held_out", rows, 0.0) for kind in self._recipe.weights}

    def _documents(self, kind: str) -> Array:
        return self._stream(kind, "train")

    def _stream(self, kind: str, side: str) -> Array:
        corpus, seed = self._corpora[kind], self._recipe.seed
        documents = corpus.train if side == "train" else corpus.held_out
        return cached(
            self._folder / f"{kind}.{side}.npy",
            lambda: token_stream(self._verifier.tokenizer, documents, seed, self._verifier.eos, self._dtype),
        )

    def _written(self, kind: str, source: str) -> Array:
        """Return a stream that the verifier wrote, row after row."""
        spec = self._recipe.self_text
        rows = [self._rows(kind, "train", spec.rows, t) for t in spec.temperatures_of(source)]
        return np.concatenate(rows).reshape(-1)

    def _rows(self, kind: str, side: str, rows: int, temperature: float) -> Array:
        spec = self._recipe.self_text
        name = f"{kind}.{side}.{temperature:g}"
        seed = _seed(self._recipe.seed, name)

        def make() -> Array:
            prompts = self._prompts(kind, side, rows, seed)
            written = write_rows(
                self._verifier.model, prompts, spec.new_tokens, temperature, seed,
                lambda done, of: self._progress(name, done, of),
            )  # fmt: skip
            return written.astype(self._dtype)

        return cached(self._folder / f"{name}.rows.npy", make)

    def _prompts(self, kind: str, side: str, rows: int, seed: int) -> Array:
        """Return parts of documents; without documents, beginnings that the verifier samples."""
        length = self._recipe.self_text.prompt_tokens
        if self._corpora:
            return prompts_from(self._stream(kind, side), rows, length, seed)
        begin = np.full((rows, 1), self._verifier.bos)
        return write_rows(self._verifier.model, begin, length - 1, 1.0, _seed(seed, "prompts")) if length > 1 else begin


def token_counts(streams: Mapping[str, Array], vocab_size: int) -> NDArray[np.int64]:
    """Return the number of times that every token occurs in all streams, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for stream in streams.values():
        counts += np.bincount(stream, minlength=vocab_size)
    return counts


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")
