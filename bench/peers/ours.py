"""redraft as a decoder: plain, with n-grams, and by the bundle's default method if that is another one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from redraft.bench.peers.base import NGRAM, PLAIN, Decoded, Model
from redraft.methods import NONE
from redraft.runtime import Runtime, SamplingParams

NAME = "redraft"


class Ours:
    """An open bundle with redraft's own defaults."""

    def __init__(self, model: Model) -> None:
        self._runtime = Runtime.open(model.path, threads=model.threads)
        self.modes = tuple(dict.fromkeys((PLAIN, NGRAM, self._runtime.default_method)))
        self.settings = {"bundle": str(model.path), "threads": model.threads, "exact": self._runtime.exact}

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Decoded:
        """See `Decoder.decode`."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        done = self._runtime.generate([list(token_ids)], params, NONE if mode == PLAIN else mode)[0]
        seconds = time.perf_counter() - start - done.metrics.time_to_first_token_ms / 1e3
        return Decoded(done.token_ids, seconds)
