"""Rejection sampling end to end: drafters draw from their own distributions, and texts have the verifier's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from redraft.runtime import Runtime, SamplingParams, SpeculationParams
from redraft.runtime.controllers.base import FixedBudget
from redraft.runtime.drafters.candidate_noise import ChainProposal
from redraft.runtime.trees.tree import root_only
from redraft.types import Budget, OfferKind
from tests.runtime.lyanna_bundle import STEPS

TREES = Budget(8, STEPS, 3)
BINS, TEMPERATURE = 16, 0.7
FAR = 49.0
"""Chi-square of 15 degrees of freedom exceeds this with a probability of 2e-5."""


@pytest.fixture
def runtime(lyanna_bundle: Path, unmeasured: None) -> Iterator[Runtime]:
    """Eight requests share each call, which takes a fifth of the time of eight calls."""
    with Runtime.open(lyanna_bundle, threads=1, max_num_seqs=8, verify=False) as runtime:
        yield runtime


def chi_square(runtime: Runtime, how: SpeculationParams | str, acceptance: str, requests: int = 24) -> float:
    """Return the chi-square of texts against the verifier's distribution.

    If a token has that distribution after its text, a random number between the cumulative probabilities before and
    after it, likeliest tokens first, is uniform (probability integral transform). So one test takes all tokens.
    """
    known: list[dict[int, np.ndarray]] = [{} for _ in range(requests)]

    def record(seed: int, tokens: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        known[seed][len(tokens)] = logits.copy()
        return logits

    params = [
        SamplingParams(
            max_tokens=80,
            temperature=TEMPERATURE,
            seed=seed,
            ignore_eos=True,
            acceptance=acceptance,
            logits_processors=(partial(record, seed),),
        )
        for seed in range(requests)
    ]
    rng, numbers = np.random.default_rng(0), []
    texts = runtime.generate([[3 + seed % 7, 4] for seed in range(requests)], params, how)
    for logits, text in zip(known, texts, strict=True):
        for place, token in enumerate(text.token_ids, 2):
            weights = np.exp(logits[place].astype(np.float64) / TEMPERATURE)
            weights /= weights.sum()
            likelier = weights[np.lexsort((np.arange(len(weights)), -weights))].cumsum()
            rank = int((weights > weights[token]).sum() + (weights[:token] == weights[token]).sum())
            numbers.append(likelier[rank] - rng.random() * weights[token])
    counts = np.histogram(numbers, BINS, (0, 1))[0]
    assert counts.sum() > 70 * requests
    expected = counts.sum() / BINS
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("acceptance", "how"),
    [
        ("rejection", SpeculationParams("lyanna", budget=TREES)),
        ("rejection", SpeculationParams("lyanna", prediction=[3, 4, 5, 6] * 8, budget=Budget(12, STEPS, 9))),
        ("rejection", SpeculationParams("ngram+lyanna")),
        ("block", SpeculationParams("lyanna", budget=Budget(STEPS, STEPS, 1))),
        ("block", SpeculationParams("ngram", budget=TREES)),
    ],
    ids=["trees", "merged trees", "adaptive", "blocks", "chosen blocks"],
)
def test_texts_have_the_verifiers_distribution(runtime: Runtime, acceptance: str, how: SpeculationParams) -> None:
    assert chi_square(runtime, how, acceptance) < FAR


def test_a_drafter_that_claims_another_distribution_is_found(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ChainProposal.logits
    monkeypatch.setattr(ChainProposal, "logits", lambda self, depth, token: -right(self, depth, token))
    assert chi_square(runtime, SpeculationParams("lyanna", budget=TREES), "rejection") > FAR


@pytest.mark.parametrize("left", ["root", "lookup"])
def test_a_draft_that_was_not_verified_biases_no_later_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Of three drafts, two are dropped: the root alone, or the ready tree, is verified in their place."""
    whole, steps, drafts, resampled = FixedBudget.cut, 0, 0, 0

    def cut(self, batch):  # type: ignore[no-untyped-def]
        nonlocal steps, drafts, resampled
        steps += 1
        drafts += sum(len(step.plan.make) for step in batch.steps)
        resampled += sum(step.plan.kind is OfferKind.RESAMPLE for step in batch.steps)
        if steps % 3 == 0:
            whole(self, batch)
        elif left == "root":
            for step in batch.steps:
                step.tree = root_only(step.plan.found.tokens[0])

    monkeypatch.setattr(FixedBudget, "cut", cut)
    prediction = [3, 4, 5, 6] * 8 if left == "lookup" else None
    how = SpeculationParams("lyanna", prediction=prediction, budget=TREES)
    assert chi_square(runtime, how, "rejection", requests=48) < FAR
    assert 2 * resampled > drafts > 330


def test_drafts_are_accepted_and_texts_repeat(runtime: Runtime) -> None:
    how = SpeculationParams("lyanna", budget=Budget(STEPS, STEPS, 1))
    for acceptance in ("rejection", "block"):
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True, acceptance=acceptance)
        first, second = (runtime.generate([[3, 4]], params, how)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert first.metrics.num_accepted_draft_tokens > 10
