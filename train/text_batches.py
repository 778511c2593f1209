"""Batches of whole texts that the verifier wrote, with its states if they were kept.

A batch has a fixed number of texts of similar lengths; every epoch has its own order. What batch a step has depends on
the seed and the step alone. One prompt in `held_out_every`, with all its texts, is never trained on.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import DataError
from redraft.train.batches import Batch, BatchSource, similar_lengths
from redraft.train.config import Recipe
from redraft.train.data import is_held_out
from redraft.train.drafter_config import DrafterRecipe
from redraft.train.states import States
from redraft.train.text_shards import HIDDEN, TOP, Arrays, Shard, Shards, check_written_by
from redraft.train.verifier_model import VerifierModel

_SORTED = 32
"""Batches whose texts are sorted by length together."""
_HELD_OUT_ROWS = 8


@dataclass(frozen=True)
class _Text:
    """Place of a text: `first` is its first token in the shard."""

    shard: Shard
    first: int
    length: int
    prompt: int
    kind: str
    temperature: float

    def array(self, name: str) -> NDArray[Any]:
        """Return one of its arrays."""
        return self.shard.array(name)[self.first : self.first + self.length]


class WrittenText:
    """The texts of a run that are whole texts in a folder of `redraft train text`.

    recipe: the run's recipe.   training, held_out_texts: the texts on both sides.   digest: SHA-256 of all tokens.
    settings: values of the recipe that chose the texts; a resumed run must have the same.
    """

    def __init__(self, folder: Path, recipe: DrafterRecipe, hidden_states: Sequence[str]) -> None:
        """hidden_states: those to load with a text, if they were kept. Raises DataError if there are no texts."""
        self.recipe, self._folder, self._hidden_states = recipe, folder, tuple(hidden_states)
        self.settings = {"seed": recipe.seed, "held_out_every": recipe.held_out_every, "texts": recipe.texts}
        self.training: list[_Text] = []
        self.held_out_texts: list[_Text] = []
        Shards(folder).check_complete()
        self._lacking: tuple[str, ...] = ()
        sha = hashlib.sha256()
        for shard in Shards(folder):
            if TOP[0] in shard and not self._lacking:
                self._lacking = tuple(name for name in self._hidden_states if HIDDEN + name not in shard)
            tokens = shard.array("tokens").astype(np.uint32)
            sha.update(tokens.tobytes())
            self._add(shard, tokens)
        if not self.training or not self.held_out_texts:
            some = "" if recipe.answers == "all" else f"{recipe.answers} "
            raise DataError(
                f"{folder} has no {some}texts to train on, or none to hold out", "write some with `redraft train text`"
            )
        self.digest = sha.hexdigest()

    def _add(self, shard: Shard, tokens: NDArray[np.uint32]) -> None:
        """Take the texts of a shard with at least two tokens after the prompt."""
        for text in _texts(shard):
            prompt = tokens[text.first : text.first + text.prompt].tobytes()
            if text.length - text.prompt < 2:
                continue
            if is_held_out(text.kind, hashlib.sha256(prompt).hexdigest(), self.recipe.held_out_every):
                self.held_out_texts.append(text)
            elif self.recipe.answers in ("all", "sampled" if text.temperature else "greedy"):
                self.training.append(text)

    @property
    def computed_again(self) -> str:
        """A line about hidden states that a shard lacks although it keeps others; empty if it lacks none."""
        if not self._lacking:
            return ""
        return (
            f"{self._folder} keeps no hidden states {', '.join(self._lacking)}: the verifier computes all states again "
            f"at every step; `redraft train states PACKED --hidden-states {','.join(self._hidden_states)}` keeps them, "
            "with a folder PACKED of `redraft train pack`"
        )

    @property
    def batches(self) -> float:
        """Batches of all texts."""
        return len(self.training) // self.recipe.texts

    def check(self, verifier: VerifierModel, lookahead: int) -> None:
        """Raise UsageError if another verifier wrote the texts."""
        check_written_by(self._folder, verifier.identity)

    def plan(self, lookahead: int) -> BatchSource:
        """Return batches of texts."""
        return TextPlan(self, self.recipe.texts, self.recipe.seed)

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often the verifier wrote every token in the training texts, int64 [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for text in self.training:
            counts += np.bincount(text.array("tokens")[text.prompt :], minlength=vocab_size)
        return counts

    def facts(self) -> dict[str, Any]:
        """Return by kind, as `tokens`: `texts` to train on, `written` tokens of the answers, `all` with prompts."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: {"texts": 0, "written": 0, "all": 0})
        for text in self.training:
            kind = found[text.kind]
            kind["texts"] += 1
            kind["written"] += text.length - text.prompt
            kind["all"] += text.length
        return {kind: {"tokens": sizes} for kind, sizes in sorted(found.items())}

    def held_out(self, lookahead: int) -> Mapping[str, list[Batch]]:
        """Return batches of greedy held-out texts of every kind, to measure acceptance on."""
        kinds: dict[str, list[_Text]] = defaultdict(list)
        for text in self.held_out_texts:
            if text.temperature == 0 and len(kinds[text.kind]) < self.recipe.self_text.held_out_rows:
                kinds[text.kind].append(text)
        return {
            kind: [self.batch(texts[i : i + _HELD_OUT_ROWS]) for i in range(0, len(texts), _HELD_OUT_ROWS)]
            for kind, texts in sorted(kinds.items())
        }

    def batch(self, texts: Sequence[_Text]) -> Batch:
        """Return a batch of these texts. Drafts start at the last token of the prompt or later."""
        names = [HIDDEN + name for name in self._hidden_states]
        kept = all(name in text.shard for text in texts for name in names)
        arrays = [{name: text.array(name) for name in ("tokens", *((*names, *TOP) if kept else ()))} for text in texts]
        return text_batch(arrays, [text.prompt for text in texts], tuple(text.kind for text in texts))


def text_batch(texts: Sequence[Arrays], prompts: Sequence[int], kinds: tuple[str, ...]) -> Batch:
    """Return a batch of whole texts, each with arrays of its tokens by name, as of `redraft.train.text_shards`.

    prompts: tokens of each prompt. Drafts start at the last one or later.
    """
    lengths = [len(text["tokens"]) for text in texts]
    tensors = {name: _padded([text[name] for text in texts], max(lengths)) for name in texts[0]}
    starts = [torch.arange(prompt - 1, length - 2) for prompt, length in zip(prompts, lengths, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(starts, batch_first=True, padding_value=-1)
    states = States.of_tensors(tensors) if "log_sum" in tensors else None
    return Batch(tensors["tokens"].long(), kinds, padded, torch.tensor(lengths) - 1, states)


class TextPlan:
    """Batches of training texts."""

    def __init__(self, texts: WrittenText, rows: int, seed: int) -> None:
        """rows: texts of a batch. Raises DataError if there are fewer texts."""
        if len(texts.training) < rows:
            raise DataError(f"{len(texts.training)} texts are fewer than the {rows} of a batch", "write more texts")
        self._texts, self._rows, self._seed = texts, rows, seed
        self._lengths = np.array([text.length for text in texts.training])
        self._order = lru_cache(maxsize=2)(self._make_order)

    def batch(self, step: int, recipe: Recipe) -> Batch:
        """Return the batch of `step`."""
        epoch, place = divmod(step, len(self._lengths) // self._rows)
        return self._texts.batch([self._texts.training[i] for i in self._order(epoch)[place]])

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the texts of every batch of an epoch: int64 [batches, rows]."""
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        batches = len(self._lengths) // self._rows
        order = rng.permutation(len(self._lengths))[: batches * self._rows]
        return np.stack(similar_lengths(order, self._lengths, self._rows, _SORTED, rng))


def _texts(shard: Shard) -> list[_Text]:
    lengths = shard.array("lengths").tolist()
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    prompts, kinds = shard.array("prompts").tolist(), shard.array("kinds").tolist()
    temperatures = shard.array("temperatures").tolist()
    return [_Text(shard, *place) for place in zip(firsts, lengths, prompts, kinds, temperatures, strict=True)]


def _padded(parts: Sequence[NDArray[Any]], length: int) -> torch.Tensor:
    """Return arrays of different lengths [L_i, ...] as one tensor [B, length, ...], zeros after their ends."""
    dtype = np.int64 if parts[0].dtype.kind == "u" else parts[0].dtype
    padded = np.zeros((len(parts), length, *parts[0].shape[1:]), dtype)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(padded)
