"""Sampling down a tree: tokens, log probabilities and margins are those without a tree, and draws are coupled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from redraft.runtime import SamplingParams
from redraft.runtime.sampling import make_sampler
from redraft.runtime.sampling.path_sampler import choose, perturbed
from redraft.runtime.sampling.sampler import Sampler
from redraft.runtime.sampling.truncation import Support, support_of
from redraft.runtime.trees.tree import make_tree, root_only
from redraft.types import NOT_REACHED, DraftTree

from .statistics import LIMIT, fit

VOCABULARY, PROMPT, LENGTH = 24, [3, 1, 4], 60
STOPS = (0, 7)


def model(path: Sequence[int]) -> np.ndarray:
    """Return the toy model's logits after a path. They depend on the last three tokens."""
    return _logits_after(*path[-3:])


@cache
def _logits_after(*tokens: int) -> np.ndarray:
    logits = np.random.default_rng([7, *tokens]).normal(0, 2, VOCABULARY).astype(np.float32)
    logits.setflags(write=False)
    return logits


def twice(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """Doubles logits of even tokens after an odd number of tokens: depends on the whole path's length and end."""
    logits[(tokens[-1] + len(tokens)) % 2 :: 2] *= 1.5
    return logits


def random_tree(generator: np.random.Generator, tokens: list[int]) -> tuple[DraftTree, list[list[int]]]:
    """Return a random tree of likely tokens, whose siblings differ, and each node's path."""
    ids, parents, paths = [tokens[-1]], [-1], [list(tokens)]
    for _ in range(generator.integers(0, 30)):
        parent = int(generator.integers(0, len(ids)))
        likely = np.argsort(-model(paths[parent]))[:8]
        token = int(generator.choice(likely))
        if all(ids[n] != token for n in range(len(ids)) if parents[n] == parent):
            ids.append(token)
            parents.append(parent)
            paths.append([*paths[parent], token])
    return make_tree(ids, parents, [1.0] * len(ids)), paths


def decode(params: SamplingParams, trees: int | None) -> tuple[Sampler, list[int], int]:
    """Return the sampler, its tokens and how many were accepted. trees: seed of random trees, None for none."""
    sampler, tokens, accepted = make_sampler(params, STOPS, True), list(PROMPT), 0
    generator = np.random.default_rng(trees)
    while len(tokens) < len(PROMPT) + LENGTH:
        tree, paths = (root_only(tokens[-1]), [tokens])
        if trees is not None and len(tokens) > len(PROMPT):
            tree, paths = random_tree(generator, tokens)
        logits = np.stack([model(path) for path in paths])
        kept = logits.copy()
        outcome = sampler.verify(logits, tree, tokens)
        assert (logits == kept).all(), "the verifier's logits are read only"
        assert outcome.error is None
        reached = [0, *outcome.path]
        assert [n for n, target in enumerate(outcome.target_token_ids) if target >= 0] == sorted(reached)
        assert [outcome.target_token_ids[n] for n in reached] == list(outcome.tokens)
        tokens += outcome.tokens
        accepted += outcome.accepted
    return sampler, tokens[len(PROMPT) :][:LENGTH], accepted


ALL = dict(
    temperature=0.8, top_k=12, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
    frequency_penalty=0.2, logit_bias={5: 1.5, 6: -1.0}, banned_tokens=(2,), min_tokens=20, logprobs=3,
    logits_processors=(twice,), max_tokens=LENGTH,
)  # fmt: skip
PARAMS = {
    "sampled": dict(temperature=1.0),
    "hot": dict(temperature=3.0, logprobs=2),
    "all": ALL,
    "greedy with processors": {**ALL, "temperature": 0.0},
    "truncated": dict(temperature=1.0, top_k=4, logprobs=0),
}


@pytest.mark.parametrize("values", PARAMS.values(), ids=PARAMS)
def test_random_trees_change_nothing(values: dict[str, object]) -> None:
    accepted = 0
    for seed in range(3):
        params = SamplingParams(seed=seed, **values)
        plain, expected, _ = decode(params, None)
        for trees in range(3):
            sampler, tokens, kept = decode(params, 100 * seed + trees)
            accepted += kept
            assert tokens == expected
            assert sampler.logit_margins[:LENGTH] == plain.logit_margins[:LENGTH]
            assert (sampler.logprobs or [])[:LENGTH] == (plain.logprobs or [])[:LENGTH]
    assert accepted > 55


def test_seeds_and_positions_matter() -> None:
    texts = [decode(SamplingParams(temperature=1.0, seed=seed), None)[1] for seed in (0, 1, 2**63 - 1, 0)]
    assert texts[0] == texts[3]
    assert len({tuple(text) for text in texts}) == 3
    assert len(set(texts[0])) > 5


def test_log_probabilities_are_those_of_the_drawn_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_k=4, logit_bias={9: 0.7}, logprobs=3)
    sampler, tokens, _ = decode(params, 1)
    path = list(PROMPT)
    for token, found in zip(tokens, sampler.logprobs, strict=False):
        logits = model(path).astype(np.float64)
        logits[9] += np.float32(0.7)
        likely = np.argsort(-logits)[:4]
        probs = np.exp(logits[likely] / 0.5)
        expected = dict(zip(likely.tolist(), np.log(probs / probs.sum()), strict=True))
        assert found.token_id == token
        assert found.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [other for other, _ in found.top] == likely[:3].tolist()
        assert [value for _, value in found.top] == pytest.approx([expected[other] for other, _ in found.top], abs=1e-5)
        path.append(token)


def test_alternatives_leave_out_what_is_never_drawn() -> None:
    params = SamplingParams(logprobs=VOCABULARY, banned_tokens=tuple(range(3, VOCABULARY)))
    sampler = make_sampler(params)
    sampler.verify(model(PROMPT)[None], root_only(4), PROMPT)
    (found,) = sampler.logprobs
    assert sorted(token for token, _ in found.top) == [0, 1, 2]
    assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1)


def test_an_error_below_accepted_nodes_keeps_their_tokens() -> None:
    """Without a tree, the request would have had these tokens before it failed."""

    def fails(tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(tokens) == 6:
            raise ValueError("six tokens")
        return logits

    sampler = make_sampler(SamplingParams(logits_processors=(fails,)))
    tokens = list(PROMPT)
    tokens += sampler.verify(model(tokens)[None], root_only(4), tokens).tokens
    chain = [tokens[-1]]
    paths = [list(tokens)]
    for _ in range(4):
        chain.append(int(model(paths[-1]).argmax()))
        paths.append([*paths[-1], chain[-1]])
    tree = make_tree(chain, [-1, 0, 1, 2, 3], [1.0] * 5)
    outcome = sampler.verify(np.stack([model(path) for path in paths]), tree, tokens)
    assert outcome.path == (1, 2)
    assert list(outcome.tokens) == chain[1:3]
    assert str(outcome.error) == "token 4: a logits processor raised ValueError: six tokens"


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_targets_after_pinned_nodes_are_known(temperature: float, acceptance: str) -> None:
    """They are what plain decoding would choose there without processors; by rejection, the likeliest tokens.

    No token can follow the last node.
    """
    values = dict(temperature=temperature, top_k=12, seed=3, logits_processors=(twice,), acceptance=acceptance)
    sampler = make_sampler(SamplingParams(**values), STOPS)
    tree, paths = make_tree([4, 20, 21, 22, 23], [-1, 0, 1, 0, 3], [1.0] * 5, [False, True, False, True, True]), [[]]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append([*paths[parent], token])
    logits = np.stack([model([*PROMPT, *path]) for path in paths])
    logits[4] = np.nan
    outcome = sampler.verify(logits, tree, PROMPT)
    assert outcome.path == ()
    params = SamplingParams(temperature=temperature if acceptance == "coupled" else 0.0, top_k=12, seed=3, logprobs=0)
    for node in (1, 3):
        alone = make_sampler(params, STOPS)
        expected = alone.verify(logits[node][None], root_only(0), [*PROMPT, *paths[node]]).bonus
        assert outcome.target_token_ids[node] == expected
    assert [outcome.target_token_ids[node] for node in (2, 4)] == [NOT_REACHED] * 2


DRAWS = 100_000
DISTRIBUTIONS = ({"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01})


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
        part = whole.subset(np.flatnonzero(scores > 1))
        token = choose(whole, 2, position)
        if token in part.ids:
            kept += 1
            assert part.token(choose(part, 2, position)) == token
    assert 50 < kept < 290


@pytest.mark.parametrize("values", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution(values: dict[str, float]) -> None:
    """A sampler that takes the likeliest token too often, 1 % of total variation, is found.

    That adds at least 1e-4 * DRAWS / p to chi-square of 40 bins: for the likeliest token's probability p, at most 0.15,
    more than 7 standard deviations.
    """
    row = np.random.default_rng(len(values)).normal(0, 1.6, 256).astype(np.float32)
    support = support_of(row, SamplingParams(**values))
    probs = support.probs(256)
    places = np.fromiter((choose(support, 11, position) for position in range(DRAWS)), np.int64, DRAWS)
    tokens = places if support.ids is None else support.ids[places]
    assert fit(tokens, probs) < LIMIT
    likeliest = int(probs.argmax())
    often = np.random.default_rng(0).random(DRAWS) < 0.01 / (1 - probs[likeliest])
    assert fit(np.where(often, likeliest, tokens), probs) > LIMIT
