"""Temperature, top-k, top-p and min-p against their definitions over the whole sorted vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.errors import UsageError
from redraft.runtime import SamplingParams
from redraft.runtime.sampling.truncation import log_probs, support_of


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def reference(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Return the tokens that are left, by whole sorts in float64."""
    scores = logits.astype(np.float64) / params.temperature
    left = np.ones(len(scores), bool)
    if params.top_k:
        left &= scores >= np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
    probs = softmax(np.where(left, scores, -np.inf))
    order = np.argsort(-probs, kind="stable")
    before = np.concatenate([[0], np.cumsum(probs[order])[:-1]])
    left[order[before >= params.top_p]] = False
    left &= probs >= params.min_p * probs.max()
    return np.flatnonzero(left).tolist()


CASES = [
    {"top_k": 5}, {"top_k": 1}, {"top_k": 10_000}, {"top_p": 0.9}, {"top_p": 0.2}, {"top_p": 0.999}, {"min_p": 0.1},
    {"min_p": 1.0}, {"top_k": 40, "top_p": 0.7, "min_p": 0.05}, {"top_k": 3, "top_p": 0.5}, {"top_p": 1e-9},
]  # fmt: skip


@pytest.mark.parametrize("values", CASES, ids=str)
def test_the_tokens_left_are_those_of_the_definition(values: dict[str, float]) -> None:
    for seed in range(15):
        generator = np.random.default_rng(seed)
        logits = generator.normal(0, generator.choice([0.1, 1.0, 4.0]), 2000).astype(np.float32)
        params = SamplingParams(temperature=float(generator.choice([0.3, 1.0, 2.5])), **values)
        found = support_of(logits.copy(), params)
        ids = list(range(2000)) if found.ids is None else found.ids.tolist()
        assert ids == reference(logits, params)
        expected = softmax(logits.astype(np.float64)[ids] / params.temperature)
        assert np.exp(log_probs(found.scores)) == pytest.approx(expected, rel=1e-4)


def test_equally_likely_tokens() -> None:
    """Top-k keeps all that are as likely as the last, as vLLM does. Top-p keeps the lower ids."""
    logits = np.array([1, 2, 2, 0, 2], np.float32)
    assert support_of(logits.copy(), SamplingParams(temperature=1, top_k=2)).ids.tolist() == [1, 2, 4]
    assert support_of(logits.copy(), SamplingParams(temperature=1, top_p=0.4)).ids.tolist() == [1, 2]


def test_greedy_decoding_keeps_every_token_at_temperature_1() -> None:
    logits = np.array([1, 3, 2], np.float32)
    found = support_of(logits.copy(), SamplingParams(top_k=1, top_p=0.1))
    assert found.ids is None
    assert found.scores.tolist() == [-2, 0, -1]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-20, 1.0])
def test_forbidden_and_demanded_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=2)
    forbidden = support_of(np.array([-np.inf, 1, -np.inf], np.float32), params)
    assert forbidden.token(int(forbidden.scores.argmax())) == 1
    demanded = support_of(np.array([1, 2, np.inf], np.float32), params)
    assert np.exp(demanded.scores[-1]) == 1
    assert np.exp(demanded.scores[:-1]).sum() == 0
    with pytest.raises(UsageError, match="no token is left to choose"):
        support_of(np.full(3, -np.inf, np.float32), params)
