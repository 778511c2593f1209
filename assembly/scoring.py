"""Logits of whole token sequences by a bundle's verifier, and their perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from redraft import names
from redraft.engines import Bundle, open_calls
from redraft.engines.calls import Call, Calls
from redraft.signatures import VerifierShape
from redraft.types import FloatArray, IntArray

CHUNK_TOKENS = 64


class Scorer:
    """Runs the verifier over one sequence at a time, as a chain, in chunks of CHUNK_TOKENS."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.max_model_len = bundle.manifest.max_model_len
        self._engine = open_calls(bundle, names.VERIFIER, threads)
        bind_caches(self._engine, bundle.manifest.shape, self.max_model_len)

    def logits(self, token_ids: Sequence[int]) -> Iterator[FloatArray]:
        """Yield logits after every token, a chunk [T, V] at a time. Each chunk overwrites the one before.

        Raises ValueError if the sequence is longer than `max_model_len`.
        """
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"{len(token_ids)} tokens do not fit max_model_len {self.max_model_len}")
        tokens = np.asarray(token_ids, np.int64)
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            call = self._engine.prepare(B=1, T=len(chunk), R=len(chunk))
            fill_chain(call, chunk, start)
            call.run()
            yield call.outputs[names.LOGITS][0]

    def perplexity(self, token_ids: Sequence[int], window: int) -> float:
        """Return the perplexity: exp of the mean negative log-likelihood of all tokens but each window's first."""
        losses = [
            loss for start in range(0, len(token_ids), window) for loss in self._losses(token_ids[start:][:window])
        ]
        return float(np.exp(np.mean(losses)))

    def _losses(self, token_ids: Sequence[int]) -> Iterator[float]:
        targets = np.asarray(token_ids[1:], np.int64)
        for start, chunk in zip(range(0, len(token_ids), CHUNK_TOKENS), self.logits(token_ids), strict=True):
            wanted = targets[start : start + len(chunk)]
            scores = chunk[: len(wanted)].astype(np.float64)
            top = scores.max(-1, keepdims=True)
            normalizer = top[:, 0] + np.log(np.exp(scores - top).sum(-1))
            yield from normalizer - scores[np.arange(len(wanted)), wanted]


def bind_caches(calls: Calls, shape: VerifierShape, rows: int) -> None:
    """Bind empty KV buffers of one sequence."""
    for layer in range(shape.layers):
        for cache in (names.key_cache(layer), names.value_cache(layer)):
            calls.bind(cache, np.zeros((1, shape.kv_heads, rows, shape.head_dim), np.float32))


def fill_chain(call: Call, tokens: IntArray, start: int) -> None:
    """Set the inputs of one sequence: a chain of `tokens` from position `start`, with logits for every row."""
    count = len(tokens)
    call.inputs[names.TOKEN_IDS][0] = tokens
    call.inputs[names.POSITIONS][0] = np.arange(start, start + count)
    if names.TREE_MASK in call.inputs:  # a graph for chains has no tree mask
        call.inputs[names.TREE_MASK][0] = np.tri(count, dtype=bool)
    call.inputs[names.CACHE_LEN][0] = start
    call.inputs[names.KV_LEN][0] = start + count
    call.inputs[names.OUTPUT_ROWS][0] = np.arange(count)
