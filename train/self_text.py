"""Text that a verifier writes itself. A drafter learns from this text, since it must predict it later.

Rows begin with parts of a corpus. The verifier continues many at once, greedily or by sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.errors import DataError
from redraft.train.text_shards import split
from redraft.train.writer import Prompt, Writer

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
    writer = Writer(model, frozenset(), new_tokens)
    rows = []
    for first in range(0, len(prompts), ROWS_AT_ONCE):
        batch = [Prompt(tuple(row.tolist()), temperature) for row in prompts[first : first + ROWS_AT_ONCE]]
        rows.append(writer.write(batch, _seed_of(seed, first)).tokens.reshape(len(batch), -1))
        progress(min(first + ROWS_AT_ONCE, len(prompts)), len(prompts))
    return np.concatenate(rows)


def _seed_of(seed: int, first: int) -> int:
    """Return a seed for the rows from `first` on."""
    return int(np.random.SeedSequence([seed, first]).generate_state(1)[0])


def continue_greedily(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, ends: frozenset[int]
) -> list[list[int]]:
    """Continue prompts of any lengths greedily, up to a token of `ends`. Returns prompts with their continuations."""
    writer = Writer(model, ends, new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: list[list[int]] = [[]] * len(prompts)
    for begin in range(0, len(order), ROWS_AT_ONCE):
        some = order[begin : begin + ROWS_AT_ONCE]
        written = writer.write([Prompt(tuple(prompts[i])) for i in some], 0)
        for index, text in zip(some, split(written.lengths, written.tokens), strict=True):
            texts[index] = text.tolist()
    return texts


def prompts_from(stream: NDArray[np.integer[Any]], rows: int, length: int, seed: int) -> NDArray[np.int64]:
    """Return `rows` parts of `length` tokens from random places of a token stream, int64 [rows, length]."""
    if len(stream) <= length:
        raise DataError(f"the corpus has {len(stream)} tokens, too few for prompts of {length}")
    starts = np.random.Generator(np.random.PCG64(seed)).integers(0, len(stream) - length, rows)
    return np.stack([stream[start : start + length] for start in starts]).astype(np.int64)
