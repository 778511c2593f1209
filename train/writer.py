"""The verifier's continuations of many prompts at once, and everything that a drafter's training reads of them.

All rows of a batch are at the same position, so no row is padded: a row first takes its own prompt's tokens, then the
verifier's. A finished row leaves the batch when a quarter of the rows have finished. Layers keep KV in buffers with
spare positions, because a new buffer for every token costs as much as the attention itself. With one query row, the
query heads of a key head are rows of one product: no key head is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from redraft.train.states import States, run_verifier, states_of
from redraft.train.text_shards import split

_PREFILL_TOKENS = 4096  # logits of so many positions are in memory at once
_COMPACT_BELOW = 0.75
_ROWS_AT_ONCE = 32
_SPARE = 64
_ATTENTION = "redraft_batched"


@dataclass(frozen=True)
class TextStart:
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


Write = Callable[[Sequence[TextStart], frozenset[int], int, int], Written]
"""Continues prompts, none of them empty, up to one of these tokens or by at most so many, with a seed."""


@dataclass(frozen=True)
class Engines:
    """Engines that write in place of a verifier's modules.

    write: keeps no states.   max_positions: longest prompt with its answer.
    name:  of their build, for the record of the texts.
    """

    write: Write
    max_positions: int
    name: str


class Writer:
    """Continues prompts up to a token of `ends`, or by `new_tokens` tokens."""

    def __init__(self, model: Any, ends: frozenset[int], new_tokens: int, hidden_states: tuple[str, ...] = ()) -> None:
        """`hidden_states` names those to keep, with the likeliest logits; without any, only tokens are returned."""
        self._model, self._new_tokens, self._hidden_states = model, new_tokens, hidden_states
        self._ends = torch.tensor(sorted(ends), device=model.device)

    @torch.inference_mode()
    def write(self, prompts: Sequence[TextStart], seed: int) -> Written:
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
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Rows:
    """The state of one batch: R rows, A of them active."""

    def __init__(self, writer: Writer, prompts: Sequence[TextStart], generator: torch.Generator) -> None:
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
        self._cache = _BatchedCache(self._model.config.get_text_config().num_hidden_layers)
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
            cache = _BatchedCache(len(self._cache.layers))
            logits.append(self._forward(cache, part, 0))
            caches.append(cache)
        self._cache.join(caches)
        self._choose(*(torch.cat(parts) for parts in zip(*logits, strict=True)))

    def step(self) -> None:
        """Compute the token at the next position of every active row, and choose the one after it."""
        self._place += 1
        self._choose(*self._forward(self._cache, self._rows, self._place - 1))

    def _forward(self, cache: _BatchedCache, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
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


class _Layer(DynamicLayer):
    """A layer's keys and values [R, Hkv, positions, D], as views of buffers that grow by `_SPARE` positions."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows. Returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self._length = 0
        begin, self._length = self._length, self._length + key_states.shape[2]
        if self._length > self._buffers[0].shape[2]:
            spare = (0, 0, 0, self._length - begin + _SPARE)
            self._buffers = [F.pad(buffer[:, :, :begin], spare) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin : self._length] = states
        return self._view()

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]
        self._view()

    def _view(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class _BatchedCache(Cache):
    """A cache for full attention in every layer."""

    def __init__(self, layers: int) -> None:
        self.growing = [_Layer() for _ in range(layers)]  # type: ignore[no-untyped-call]
        super().__init__(layers=[*self.growing])

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        for layer in self.growing:
            layer.select(rows)

    def join(self, parts: Sequence[_BatchedCache]) -> None:
        """Take the rows of several caches, in order. This cache must be empty."""
        for layer, rows in zip(self.growing, zip(*(part.growing for part in parts), strict=True), strict=True):
            layer.update(torch.cat([one.keys for one in rows]), torch.cat([one.values for one in rows]))


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend as `sdpa` does. One unmasked query row [R, Hq, 1, D] takes the product without repeated heads."""
    rows, heads, length, width = query.shape
    if length > 1 or attention_mask is not None:
        found = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return found[0], None
    grouped = query.reshape(rows, key.shape[1], -1, width)  # [R, Hkv, Hq / Hkv, D]
    out = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


def write_rows(
    model: Any, prompts: NDArray[np.integer[Any]], new_tokens: int, temperature: float, seed: int,
    progress: Callable[[int, int], None] = lambda done, rows: None,
) -> NDArray[np.int64]:  # fmt: skip
    """Continue every row of `prompts` [R, P] by `new_tokens` tokens: int64 [R, P + new_tokens].

    Temperature 0 takes the most probable token. End-of-text tokens do not end a row: the model continues after them.
    """
    writer = Writer(model, frozenset(), new_tokens)
    rows = []
    for first in range(0, len(prompts), _ROWS_AT_ONCE):
        batch = [TextStart(tuple(row.tolist()), temperature) for row in prompts[first : first + _ROWS_AT_ONCE]]
        own_seed = int(np.random.SeedSequence([seed, first]).generate_state(1)[0])
        rows.append(writer.write(batch, own_seed).tokens.reshape(len(batch), -1))
        progress(min(first + _ROWS_AT_ONCE, len(prompts)), len(prompts))
    return np.concatenate(rows)


def continue_greedily(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, ends: frozenset[int]
) -> list[list[int]]:
    """Continue prompts of any lengths greedily, up to a token of `ends`. Returns prompts with their continuations."""
    writer = Writer(model, ends, new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: list[list[int]] = [[]] * len(prompts)
    for begin in range(0, len(order), _ROWS_AT_ONCE):
        some = order[begin : begin + _ROWS_AT_ONCE]
        written = writer.write([TextStart(tuple(prompts[i])) for i in some], 0)
        for index, text in zip(some, split(written.lengths, written.tokens), strict=True):
            texts[index] = text.tolist()
    return texts
