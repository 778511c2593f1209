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
from redraft.train.writer import Engines, TextStart, Written


@contextmanager
def open_engines(bundle: Path, verifier: Identity, max_num_seqs: int, threads: int | None) -> Iterator[Engines]:
    """Open a bundle that writes texts, `max_num_seqs` at once.

    Raises UsageError if the bundle is of another verifier, and the errors of `Runtime.open`.
    """
    weights = open_bundle(bundle).manifest.model.weights
    if tuple(weights[name] for name in sorted(weights)) != verifier.weights:
        raise UsageError(f"{bundle} was built from another verifier", "give a bundle of the same weights")
    with Runtime.open(bundle, threads, max_num_seqs, prefix_slots=0) as runtime:

        def write(starts: Sequence[TextStart], ends: frozenset[int], new_tokens: int, seed: int) -> Written:
            seeds = np.random.SeedSequence(seed).generate_state(len(starts), np.uint64) % SEEDS
            params = [
                SamplingParams(max_tokens=new_tokens, temperature=start.temperature, top_k=TOP_LOGITS, seed=int(own))
                for start, own in zip(starts, seeds, strict=True)
            ]
            found = runtime.generate([list(start.tokens) for start in starts], params, "none")
            answers = [_up_to_end(one.token_ids, ends) for one in found]
            texts = [(*start.tokens, *answer) for start, answer in zip(starts, answers, strict=True)]
            lengths, prompts = map(len, texts), (len(start.tokens) for start in starts)
            tokens = np.concatenate([np.array(text, np.int64) for text in texts])
            return Written(tokens, np.array([*lengths]), np.array([*prompts]), {})

        yield Engines(write, runtime.max_model_len, runtime.build)


def _up_to_end(tokens: Sequence[int], ends: frozenset[int]) -> Sequence[int]:
    """Return an answer up to its first token of `ends`: a bundle may know fewer of them than the chat template."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))]
