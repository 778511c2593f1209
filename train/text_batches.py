"""Batches of whole texts that the verifier wrote, with its states if they were kept.

A batch has a fixed number of texts of similar lengths; every epoch has its own order. What batch a step has depends on
the seed and the step alone. One prompt in `held_out_every`, with all its texts, is never trained on.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.errors import DataError
from redraft.train.batches import Batch
from redraft.train.config import Recipe
from redraft.train.data import is_held_out
from redraft.train.drafter_config import Answers
from redraft.train.states import States
from redraft.train.text_shards import HIDDEN, TOP, Arrays, Shard, Shards

_SORTED = 32
"""Batches whose texts are sorted by length together."""


@dataclass(frozen=True)
class _Text:
    """Place of a text: `first` is its first token in the shard."""

    shard: Shard
    first: int
    length: int
    prompt: int
    kind: str
    temperature: float


class TextSet:
    """The texts of a folder that `redraft train text` wrote."""

    def __init__(
        self, folder: Path, held_out_every: int, hidden_states: Sequence[str], answers: Answers = "all"
    ) -> None:
        """hidden_states: those to load with a text.   answers: which texts to train on.

        Raises DataError if there are no texts.
        """
        self._hidden_states = tuple(hidden_states)
        self.training: list[_Text] = []
        self.held_out: list[_Text] = []
        Shards(folder).check_complete()
        self.lacking: tuple[str, ...] = ()
        """Those that a shard lacks although it keeps others. Its texts then have no states."""
        sha = hashlib.sha256()
        for shard in Shards(folder):
            if TOP[0] in shard and not self.lacking:
                self.lacking = tuple(name for name in self._hidden_states if HIDDEN + name not in shard)
            tokens = shard.array("tokens").astype(np.uint32)
            sha.update(tokens.tobytes())
            for text in _texts(shard):
                prompt = tokens[text.first : text.first + text.prompt].tobytes()
                held_out = is_held_out(text.kind, hashlib.sha256(prompt).hexdigest(), held_out_every)
                if text.length - text.prompt < 2:
                    continue
                if held_out:
                    self.held_out.append(text)
                elif answers in ("all", "sampled" if text.temperature else "greedy"):
                    self.training.append(text)
        if not self.training or not self.held_out:
            some = "" if answers == "all" else f"{answers} "
            raise DataError(
                f"{folder} has no {some}texts to train on, or none to hold out", "write some with `redraft train text`"
            )
        self.digest = sha.hexdigest()
        """SHA-256 of all tokens."""

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """Return how often the verifier wrote every token in the training texts, int64 [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for text in self.training:
            tokens = text.shard.array("tokens")[text.first + text.prompt : text.first + text.length]
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return by kind: `texts` to train on, `written` tokens of the answers, `all` tokens with prompts."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: {"texts": 0, "written": 0, "all": 0})
        for text in self.training:
            kind = found[text.kind]
            kind["texts"] += 1
            kind["written"] += text.length - text.prompt
            kind["all"] += text.length
        return dict(sorted(found.items()))

    def greedy_held_out(self, each: int, rows: int) -> dict[str, list[Batch]]:
        """Return batches of at most `each` greedy held-out texts of every kind."""
        kinds: dict[str, list[_Text]] = defaultdict(list)
        for text in self.held_out:
            if text.temperature == 0 and len(kinds[text.kind]) < each:
                kinds[text.kind].append(text)
        return {
            kind: [self.batch(texts[i : i + rows]) for i in range(0, len(texts), rows)]
            for kind, texts in sorted(kinds.items())
        }

    def batch(self, texts: Sequence[_Text]) -> Batch:
        """Return a batch of these texts. Drafts start at the last token of the prompt or later."""
        names = [HIDDEN + name for name in self._hidden_states]
        kept = all(name in text.shard for text in texts for name in names)
        arrays = [{name: _part(text, name) for name in ("tokens", *((*names, *TOP) if kept else ()))} for text in texts]
        return text_batch(arrays, [text.prompt for text in texts], tuple(text.kind for text in texts))


def text_batch(texts: Sequence[Arrays], prompts: Sequence[int], kinds: tuple[str, ...]) -> Batch:
    """Return a batch of whole texts, each with arrays of its tokens by name, as of `redraft.train.text_shards`.

    prompts: tokens of each prompt. Drafts start at the last one or later.
    """
    lengths = [len(text["tokens"]) for text in texts]
    tensors = {name: _padded([text[name] for text in texts], max(lengths)) for name in texts[0]}
    starts = [torch.arange(prompt - 1, length - 2) for prompt, length in zip(prompts, lengths, strict=True)]
    states = None
    if "log_sum" in tensors:
        hidden = {name.removeprefix(HIDDEN): tensor for name, tensor in tensors.items() if name.startswith(HIDDEN)}
        states = States(hidden, tensors["top_ids"].long(), tensors["top_logits"].float(), tensors["log_sum"])
    return Batch(
        tensors["tokens"].long(),
        kinds,
        torch.nn.utils.rnn.pad_sequence(starts, batch_first=True, padding_value=-1),
        torch.tensor(lengths) - 1,
        states,
    )


class TextPlan:
    """Batches of training texts."""

    def __init__(self, texts: TextSet, rows: int, seed: int) -> None:
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
        parts = []
        for part in np.split(order, range(_SORTED * self._rows, len(order), _SORTED * self._rows)):
            rows = part[np.argsort(self._lengths[part], kind="stable")].reshape(-1, self._rows)
            parts.append(rows[rng.permutation(len(rows))])
        return np.concatenate(parts)


def _texts(shard: Shard) -> list[_Text]:
    lengths = shard.array("lengths").tolist()
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    prompts, kinds = shard.array("prompts").tolist(), shard.array("kinds").tolist()
    temperatures = shard.array("temperatures").tolist()
    return [_Text(shard, *place) for place in zip(firsts, lengths, prompts, kinds, temperatures, strict=True)]


def _part(text: _Text, name: str) -> NDArray[Any]:
    return text.shard.array(name)[text.first : text.first + text.length]


def _padded(parts: Sequence[NDArray[Any]], length: int) -> torch.Tensor:
    """Return arrays of different lengths [L_i, ...] as one tensor [B, length, ...], zeros after their ends."""
    dtype = np.int64 if parts[0].dtype.kind == "u" else parts[0].dtype
    padded = np.zeros((len(parts), length, *parts[0].shape[1:]), dtype)
    for row, part in zip(padded, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(padded)
