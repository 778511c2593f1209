"""Text that a verifier writes itself. A drafter learns from this text, since it must predict it later.

Rows begin with parts of a corpus. The verifier continues many at once, greedily or by sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from redraft.errors import DataError

ROWS_AT_ONCE = 32
Progress = Callable[[int, int], None]


def write_rows(
    model: Any,
    prompts: NDArray[np.integer[Any]],
    new_tokens: int,
    temperature: float,
    seed: int,
    progress: Progress = lambda done, rows: None,
) -> NDArray[np.int64]:
    """Continue every row of `prompts` [R, P] by `new_tokens` tokens: int64 [R, P + new_tokens].

    Temperature 0 takes the most probable token. End-of-text tokens do not end a row: the model continues after them.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    rows = []
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = torch.from_numpy(prompts[first : first + ROWS_AT_ONCE].astype(np.int64)).to(model.device)
        rows.append(_continue(model, batch, new_tokens, temperature, generator).cpu().numpy())
        progress(min(first + ROWS_AT_ONCE, len(prompts)), len(prompts))
    return np.concatenate(rows)


@torch.inference_mode()
def _continue(
    model: Any, tokens: torch.Tensor, new_tokens: int, temperature: float, generator: torch.Generator
) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    written = [tokens]
    for _ in range(new_tokens):
        logits = model(written[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        written.append(_next(logits, temperature, generator))
    return torch.cat(written, dim=1)


def _next(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Sample one token for each row, int64 [R, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


@torch.inference_mode()
def continue_greedily(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, eos: int | None
) -> list[list[int]]:
    """Continue prompts of any lengths greedily, up to `eos`. Returns prompts with their continuations.

    Rows begin together at the shortest prompt's end. Longer prompts use their own tokens until they end.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: list[list[int]] = [[]] * len(prompts)
    for begin in range(0, len(order), ROWS_AT_ONCE):
        some = order[begin : begin + ROWS_AT_ONCE]
        rows = _continue_ragged(model, [prompts[i] for i in some], new_tokens).tolist()
        for index, row in zip(some, rows, strict=True):
            length = len(prompts[index])
            new = row[length : length + new_tokens]
            end = new.index(eos) + 1 if eos in new else len(new)
            texts[index] = row[:length] + new[:end]
    return texts


def _continue_ragged(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> torch.Tensor:
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    given = torch.full((len(prompts), longest + new_tokens), -1, device=model.device)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache = DynamicCache(config=model.config)
    written = [given[:, :shortest]]
    for place in range(shortest, given.shape[1]):
        logits = model(written[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        prompt_token = given[:, place, None]
        written.append(torch.where(prompt_token < 0, logits.argmax(-1, keepdim=True), prompt_token))
    return torch.cat(written, dim=1)


def prompts_from(stream: NDArray[np.integer[Any]], rows: int, length: int, seed: int) -> NDArray[np.int64]:
    """Return `rows` parts of `length` tokens from random places of a token stream, int64 [rows, length]."""
    if len(stream) <= length:
        raise DataError(f"the corpus has {len(stream)} tokens, too few for prompts of {length}")
    starts = np.random.Generator(np.random.PCG64(seed)).integers(0, len(stream) - length, rows)
    return np.stack([stream[start : start + length] for start in starts]).astype(np.int64)
