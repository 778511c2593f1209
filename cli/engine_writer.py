"""Texts for drafters, written by a bundle's engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from redraft.engines import open_bundle
from redraft.errors import UsageError
from redraft.export.drafters.checkpoint import Identity
from redraft.runtime.api import Runtime
from redraft.runtime.params import SEEDS, SamplingParams
from redraft.train.states import TOP_LOGITS
from redraft.train.writer import TextStart, Write, Written


@contextmanager
def open_writer(bundle: Path, verifier: Identity, max_num_seqs: int, threads: int | None) -> Iterator[Write]:
    """Open a bundle that writes texts, `max_num_seqs` at once. Its own end-of-sequence tokens end them.

    Raises UsageError if the bundle is of another verifier, and the errors of `Runtime.open`.
    """
    weights = open_bundle(bundle).manifest.model.weights
    if tuple(weights[name] for name in sorted(weights)) != verifier.weights:
        raise UsageError(f"{bundle} was built from another verifier", "give a bundle of the same weights")
    with Runtime.open(bundle, threads, max_num_seqs) as runtime:

        def write(starts: Sequence[TextStart], new_tokens: int, seed: int) -> Written:
            seeds = np.random.SeedSequence(seed).generate_state(len(starts), np.uint64) % SEEDS
            params = [
                SamplingParams(max_tokens=new_tokens, temperature=start.temperature, top_k=TOP_LOGITS, seed=int(own))
                for start, own in zip(starts, seeds, strict=True)
            ]
            found = runtime.generate([list(start.tokens) for start in starts], params, "none")
            texts = [(*start.tokens, *one.token_ids) for start, one in zip(starts, found, strict=True)]
            lengths, prompts = map(len, texts), (len(start.tokens) for start in starts)
            return Written(
                np.concatenate([np.array(text, np.int64) for text in texts]),
                np.array([*lengths]), np.array([*prompts]), {},
            )  # fmt: skip

        yield write
