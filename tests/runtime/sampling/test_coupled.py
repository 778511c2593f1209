"""Draws of the coupled sampler: fast ones are the argmax of all scores + noise, and they follow the distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redraft.runtime import Runtime, SamplingParams
from redraft.runtime.sampling.path_sampler import choose, perturbed
from redraft.runtime.sampling.truncation import Support, log_probs, support_of
from tests.engines.bundles import build_tiny

from .statistics import LIMIT, fit

DRAWS = 200_000
DISTRIBUTIONS = (
    {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "min_p": 0.01},
)  # fmt: skip


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 10.0, 100.0])
def test_a_draw_is_the_argmax_of_all_scores_and_noise(spread: float) -> None:
    """Large vocabularies take a shorter way, which leaves out tokens whose noise cannot make up for their score."""
    for seed in range(30):
        scores = np.random.default_rng(seed).normal(0, spread, 20_000).astype(np.float32)
        support = Support(None, scores - scores.max())
        assert choose(support, seed, 9) == perturbed(support, seed, 9).argmax()


def test_tokens_that_are_left_have_the_noise_of_their_ids() -> None:
    """Truncation changes no draw whose token it keeps."""
    scores = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    kept = 0
    for position in range(300):
        whole = Support(None, scores - scores.max())
        part = whole.kept(np.flatnonzero(scores > 1))
        token = choose(whole, 2, position)
        if token in part.ids:
            kept += 1
            assert part.token(choose(part, 2, position)) == token
    assert 50 < kept < 290


@pytest.fixture(scope="module")
def rows(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Logits of the embedded model after three texts."""
    bundle = build_tiny(root, tmp_path_factory.mktemp("tiny") / "tiny", "onnxruntime", "fp32", None)
    found: list[np.ndarray] = []

    def keep(tokens: object, logits: np.ndarray) -> np.ndarray:
        found.append(logits.copy())
        return logits

    with Runtime.open(bundle.path, threads=1, verify=False) as runtime:
        prompts = ["def f(", "The little dog", "import "]
        runtime.generate(prompts, SamplingParams(max_tokens=1, logits_processors=[keep]), "none")
    return found


def drawn(support: Support, choose: Callable[[int], int]) -> np.ndarray:
    """Return tokens drawn at many positions."""
    places = np.fromiter((choose(position) for position in range(DRAWS)), np.int64, DRAWS)
    return places if support.ids is None else support.ids[places]


def probabilities(support: Support, vocabulary: int) -> np.ndarray:
    """Return the distribution of a support over the vocabulary."""
    probs = np.zeros(vocabulary)
    probs[slice(None) if support.ids is None else support.ids] = np.exp(log_probs(support.scores).astype(np.float64))
    return probs / probs.sum()


@pytest.mark.slow
@pytest.mark.parametrize("values", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution(rows: list[np.ndarray], values: dict[str, float]) -> None:
    """A sampler that takes the likeliest token too often, 1 % of total variation, is found."""
    row = rows[len(values) - 1]
    support = support_of(row.copy(), SamplingParams(**values))
    probs = probabilities(support, len(row))
    tokens = drawn(support, lambda position: choose(support, 11, position))
    assert fit(tokens, probs) < LIMIT
    likeliest = int(probs.argmax())
    often = np.random.default_rng(0).random(DRAWS) < 0.01 / (1 - probs[likeliest])
    assert fit(np.where(often, likeliest, tokens), probs) > LIMIT
