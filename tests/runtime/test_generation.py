"""The pieces of a text are the text of `generate`, and their origins are the drafts that were accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.generation import Origin

PROMPT = [5, 6, 7, 5, 6]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("method", ["none", "ngram", "lyanna", "ngram+lyanna"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_texts_and_origins_are_those_of_generate(lyanna_bundle: Path, method: str, device: str | None) -> None:
    with Runtime.open(lyanna_bundle, device=device, drafter_options={"ngram": {"prompt_lookup_min": 1}}) as runtime:
        plain = runtime.generate([PROMPT], PARAMS, "none")[0]
        how = SpeculationParams(method, controller=None if method == "none" else "fixed,gamma=4")
        pieces = runtime.pieces(PROMPT, PARAMS, how)
        found = list(pieces)
        metrics = pieces.generation.metrics
    assert "".join(piece.text for piece in found) == plain.text == pieces.generation.text
    assert len(found) == len(plain.token_ids)
    counts = Counter(piece.origin for piece in found)
    drafted = counts[Origin.LOOKUP] + counts[Origin.DRAFTER]
    assert drafted == metrics.num_accepted_draft_tokens
    assert (drafted > 0) == (method != "none")
    assert bool(counts[Origin.DRAFTER]) <= ("lyanna" in method)
    assert bool(counts[Origin.LOOKUP]) <= ("ngram" in method)


def test_stopping_ends_the_text_after_the_step(lyanna_bundle: Path) -> None:
    with Runtime.open(lyanna_bundle) as runtime:
        pieces = runtime.pieces(PROMPT, PARAMS, "none")
        taken = [pieces.stop() or piece for piece in pieces]
        assert len(taken) == 1
        assert pieces.generation.finish_reason == "stop"
        assert runtime.generate([PROMPT], PARAMS, "none")[0].token_ids[:1] == pieces.generation.token_ids
