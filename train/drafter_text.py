"""The texts that a drafter learns from, behind one form: documents and their continuations, or whole written texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.errors import UsageError
from redraft.train.acceptance import greedy_rows
from redraft.train.batches import Batch, BatchPlan, Plan
from redraft.train.drafter_config import DrafterRecipe, stream_name
from redraft.train.run import data_digest, facts_of, load_corpora
from redraft.train.text_batches import TextPlan, TextSet
from redraft.train.text_store import SELF, Progress, TextStore, token_counts
from redraft.train.verifier_model import VerifierModel
from redraft.train.write_text import check_written_by

_HELD_OUT_ROWS = 8


class DrafterText(Protocol):
    """Texts of a drafter's run.

    recipe:   the run's recipe; documents have a weight for every kind.   digest: of the texts or their documents.
    settings: values of the recipe that made the texts; a resumed run must have the same.
    """

    recipe: DrafterRecipe
    digest: str
    settings: dict[str, Any]

    @property
    def batches(self) -> float:
        """Batches of an epoch."""

    def check(self, verifier: VerifierModel, lookahead: int) -> None:
        """Raise UsageError if texts do not fit the verifier."""

    def plan(self, lookahead: int) -> Plan:
        """Return the batches."""

    def held_out(self, lookahead: int) -> Mapping[str, list[Batch]]:
        """Return greedy texts of every kind to measure acceptance on."""

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often every token occurs, int64 [V]."""

    def facts(self) -> dict[str, Any]:
        """Return a record of every kind's texts, for the run's folder."""


class DocumentText:
    """Documents by kind, and the verifier's continuations of their parts."""

    def __init__(
        self, folder: Path, verifier: VerifierModel, recipe: DrafterRecipe, sources: Mapping[str, str],
        progress: Progress,
    ) -> None:  # fmt: skip
        """Read the documents of `sources`. Without any, the verifier writes all text. Texts are kept in `folder`."""
        self.recipe = recipe = with_weights(recipe, sources)
        self._corpora = load_corpora(sources, recipe) if sources else {}
        self._store = TextStore(folder, verifier, recipe, self._corpora, progress)
        self.digest = data_digest(self._corpora)
        values = recipe.to_dict()
        plain = {name: values[name] for name in ("self_text", "seed", "held_out_every")}
        self.settings = json.loads(json.dumps(plain | {"kinds": sorted(recipe.weights)}))
        self._lookahead = 0

    @cached_property
    def _streams(self) -> Mapping[str, NDArray[np.integer[Any]]]:
        return self._store.streams(self._lookahead)

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

    def plan(self, lookahead: int) -> Plan:
        """Return rows of the streams; texts that are missing are written now."""
        self._lookahead = lookahead
        return BatchPlan(self._streams, self.recipe.stream_weights(), self.recipe.seed, lookahead)

    def held_out(self, lookahead: int) -> Mapping[str, list[Batch]]:
        """Return greedy continuations of held-out documents."""
        first = self.recipe.self_text.prompt_tokens - 1
        return {kind: greedy_rows(rows, first, lookahead) for kind, rows in self._store.held_out().items()}

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return counts over all streams."""
        return token_counts(self._streams, vocab_size)

    def facts(self) -> dict[str, Any]:
        """Return sizes of documents and streams, and the names of held-out documents."""
        found: dict[str, Any] = {}
        for kind in self.recipe.weights:
            shares = self.recipe.self_text.shares()
            tokens = {source: len(self._streams[stream_name(kind, source)]) for source in shares}
            documents = facts_of(self._corpora[kind], tokens.get("text", 0)) if kind in self._corpora else {}
            found[kind] = {**documents, "tokens": tokens}
        return found


class WrittenText:
    """Whole texts in a folder of `redraft train text`."""

    def __init__(self, folder: Path, recipe: DrafterRecipe, hidden_states: Sequence[str]) -> None:
        """Open the texts, and these hidden states if they were kept. Raises DataError if there are no texts."""
        self.recipe, self._folder = recipe, folder
        self._texts = TextSet(folder, recipe.held_out_every, hidden_states, recipe.answers)
        self.digest = self._texts.digest
        self.settings = {"seed": recipe.seed, "held_out_every": recipe.held_out_every, "texts": recipe.texts}
        self._hidden_states = hidden_states

    @property
    def computed_again(self) -> str:
        """A line about hidden states that the texts lack although they keep others; empty if they lack none."""
        if not (lacking := self._texts.lacking):
            return ""
        needed = ",".join(self._hidden_states)
        return (
            f"{self._folder} keeps no hidden states {', '.join(lacking)}: the verifier computes all states again at "
            f"every step; `redraft train states PACKED --hidden-states {needed}` keeps them, with a folder PACKED of "
            "`redraft train pack`"
        )

    @property
    def batches(self) -> float:
        """Batches of all texts."""
        return len(self._texts.training) // self.recipe.texts

    def check(self, verifier: VerifierModel, lookahead: int) -> None:
        """Raise UsageError if another verifier wrote the texts."""
        check_written_by(self._folder, verifier)

    def plan(self, lookahead: int) -> Plan:
        """Return batches of texts."""
        return TextPlan(self._texts, self.recipe.texts, self.recipe.seed)

    def held_out(self, lookahead: int) -> Mapping[str, list[Batch]]:
        """Return greedy texts of held-out prompts."""
        return self._texts.greedy_held_out(self.recipe.self_text.held_out_rows, _HELD_OUT_ROWS)

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return counts over the tokens that the verifier wrote."""
        return self._texts.counts(vocab_size)

    def facts(self) -> dict[str, Any]:
        """Return texts and tokens by kind."""
        return {kind: {"tokens": sizes} for kind, sizes in self._texts.sizes().items()}


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
