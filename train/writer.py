"""The verifier's continuations of many prompts at once, and everything that a drafter's training reads of them.

All rows of a batch are at the same position, so no row is padded: a row first takes its own prompt's tokens, then the
verifier's. A finished row leaves the batch when a quarter of the rows have finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from redraft.train.batched_cache import ATTENTION, BatchedCache
from redraft.train.states import States, run_verifier, states_of

_PREFILL_TOKENS = 4096  # logits of so many positions are in memory at once
_COMPACT_BELOW = 0.75


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue.   temperature: 0 is greedy."""

    tokens: tuple[int, ...]
    temperature: float = 0.0


@dataclass(frozen=True)
class Written:
    """Texts, one after the other: T tokens of R texts.

    tokens: int64 [T].   lengths, prompts: int64 [R], tokens of every text and of its prompt.
    states: arrays of every token by name, as of `States.to_numpy`; empty if no hidden state was kept.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]
    states: dict[str, NDArray[Any]]


class Writer:
    """Continues prompts up to a token of `ends`, or by `new_tokens` tokens."""

    def __init__(self, model: Any, ends: frozenset[int], new_tokens: int, hidden_states: tuple[str, ...] = ()) -> None:
        """`hidden_states` names those to keep, with the likeliest logits; without any, only tokens are returned."""
        self._model, self._new_tokens, self._hidden_states = model, new_tokens, hidden_states
        self._ends = torch.tensor(sorted(ends), device=model.device)

    @torch.inference_mode()
    def write(self, prompts: Sequence[Prompt], seed: int) -> Written:
        """Continue the prompts, which must not be empty. The same prompts and seed give the same texts."""
        with _fast_attention(self._model):
            batch = _Rows(self, prompts, torch.Generator(self._model.device).manual_seed(seed))
            batch.prefill()
            while batch.remain:
                batch.step()
        return batch.finish()


@contextmanager
def _fast_attention(model: Any) -> Iterator[None]:
    """Use the batched form of `sdpa` attention. Models that need another attention keep theirs."""
    before = model.config._attn_implementation
    if before != "sdpa":
        yield
        return
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Rows:
    """The state of one batch: R rows, A of them active."""

    def __init__(self, writer: Writer, prompts: Sequence[Prompt], generator: torch.Generator) -> None:
        self._model, self._ends, self._generator = writer._model, writer._ends, generator
        device = self._model.device
        lengths = [len(prompt.tokens) for prompt in prompts]
        self._prompts = torch.tensor(lengths, device=device)
        self._limits = self._prompts + writer._new_tokens
        self._tokens = torch.full((len(prompts), max(lengths) + writer._new_tokens), -1, device=device)
        for row, prompt in zip(self._tokens, prompts, strict=True):
            row[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        self._temperatures = torch.tensor([prompt.temperature for prompt in prompts], device=device)[:, None]
        self._rows = torch.arange(len(prompts), device=device)  # [A]
        self._lengths = torch.zeros_like(self._prompts)
        self._place = min(lengths)
        self._cache = BatchedCache(self._model.config.get_text_config().num_hidden_layers)
        self._kept = _Kept(writer._hidden_states, *self._tokens.shape)

    @property
    def remain(self) -> bool:
        """True if a row is not finished."""
        return bool((self._lengths[self._rows] == 0).any())

    def prefill(self) -> None:
        """Compute the positions that all rows' prompts have."""
        step = max(1, _PREFILL_TOKENS // self._place)
        caches, logits = [], []
        for part in self._rows.split(step):
            cache = BatchedCache(len(self._cache.layers))
            logits.append(self._forward(cache, part, 0))
            caches.append(cache)
        self._cache.join(caches)
        self._choose(*(torch.cat(parts) for parts in zip(*logits, strict=True)))

    def step(self) -> None:
        """Compute the token at the next position of every active row, and choose the one after it."""
        self._place += 1
        self._choose(*self._forward(self._cache, self._rows, self._place - 1))

    def _forward(self, cache: BatchedCache, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute positions `start` up to the current place. Returns the last one's likeliest logits and tokens."""
        names = self._kept.names
        states = states_of(*run_verifier(
            self._model, self._tokens[rows, start : self._place], names, past_key_values=cache, use_cache=True,
            logits_to_keep=0 if names else 1,
        ))  # fmt: skip
        if names:
            self._kept.add(rows, start, states)
        return states.top_logits[:, -1], states.top_ids[:, -1]

    def _choose(self, values: torch.Tensor, ids: torch.Tensor) -> None:
        """Finish the rows that end at the last computed position, and give the others their next token."""
        rows, place = self._rows, self._place
        last = self._tokens[rows, place - 1]
        ended = (place > self._prompts[rows]) & torch.isin(last, self._ends) | (place >= self._limits[rows])
        self._lengths[rows] = torch.where(ended & (self._lengths[rows] == 0), place, self._lengths[rows])
        active = self._lengths[rows] == 0
        if not active.any():
            return
        if active.float().mean() < _COMPACT_BELOW:
            keep = active.nonzero()[:, 0]
            self._cache.select(keep)
            rows, values, ids = rows[keep], values[keep], ids[keep]
            self._rows = rows
        noise = -torch.log(torch.empty(values.shape, device=values.device).exponential_(generator=self._generator))
        chosen = (values + self._temperatures[rows] * noise).argmax(-1, keepdim=True)  # Gumbel-max
        place = min(place, self._tokens.shape[1] - 1)
        given = self._tokens[rows, place]
        self._tokens[rows, place] = torch.where(given < 0, ids.gather(1, chosen)[:, 0], given)

    def finish(self) -> Written:
        """Return the texts."""
        lengths = self._lengths.cpu().numpy()
        used = np.arange(self._tokens.shape[1]) < lengths[:, None]
        return Written(self._tokens.cpu().numpy()[used], lengths, self._prompts.cpu().numpy(), self._kept.of(used))


class _Kept:
    """Hidden states and likeliest logits by row and position."""

    def __init__(self, names: tuple[str, ...], rows: int, length: int) -> None:
        self.names = names
        self._size = (rows, length)
        self._arrays: dict[str, NDArray[Any]] = {}

    def add(self, rows: torch.Tensor, start: int, states: States) -> None:
        """Keep the states of these rows, from position `start` on."""
        places = slice(start, start + states.log_sum.shape[1])
        for name, array in states.to_numpy().items():
            if name not in self._arrays:
                self._arrays[name] = np.empty((*self._size, *array.shape[2:]), array.dtype)
            self._arrays[name][rows.cpu().numpy(), places] = array

    def of(self, used: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """Return the arrays of the used positions [R, L]."""
        return {name: array[used] for name, array in self._arrays.items()}
