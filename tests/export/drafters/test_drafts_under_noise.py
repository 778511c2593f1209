"""Drafts under noise: each sequence's candidates follow its own noise, in fresh drafts and in resampled ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from redraft import names
from redraft.engines import open_calls
from redraft.methods.chains import DRAWN_LOG_PROB
from redraft.methods.lyanna_token_info import lookup
from redraft.noise_spec import DRAWN
from tests.engines.drafters import LYANNA_DRAFT, LYANNA_DRAFT_SINGLE, LYANNA_RESAMPLE
from tests.export.drafters.test_lyanna_graphs import Draft, history, same_tree
from tests.export.drafters.tiny import Exported
from tests.noise import keys_of, noise_rows

DRAFT_BATCH, RESAMPLE_BATCH = names.batch(LYANNA_DRAFT), names.batch(LYANNA_RESAMPLE)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Noise:
    """A sequence's sampling: its seed, its temperature, the position of the token after its root, its logit scale."""

    seed: int
    temperature: float
    position: int
    scale: float = 1.3


NOISES = Noise(7, 1.0, 30), Noise(8, 0.4, 12, 0.7), Noise(9, 0.0, 5)


@pytest.fixture(params=["whole", "pruned"])
def exported(request) -> Exported:
    return request.getfixturevalue(request.param)


def inputs_of(noises: tuple[Noise, ...], steps: int) -> Arrays:
    return {
        names.NOISE_SCALE: np.array([noise.temperature for noise in noises], np.float32),
        names.DRAFT_LOGIT_SCALE: np.array([noise.scale for noise in noises], np.float32),
        names.NOISE_KEYS: np.concatenate([keys_of([noise.seed], noise.position, steps) for noise in noises]),
    }


def noisy(exported: Exported, logits: np.ndarray, noise: Noise) -> np.ndarray:
    """Logits [S, H] of the positions from the noise's own on, with their noise."""
    ids = np.arange(exported.shape.vocabulary) if exported.vocabulary is None else exported.vocabulary
    return logits + np.float32(noise.temperature) * noise_rows(noise.seed, noise.position, len(logits), ids)


@pytest.mark.parametrize("graph", [LYANNA_DRAFT, DRAFT_BATCH, LYANNA_DRAFT_SINGLE])
def test_a_draft_is_the_tree_of_each_sequences_noisy_logits(exported: Exported, graph: str) -> None:
    """Sequences of other seeds, temperatures and scales in one call; the last has no noise."""
    noises = NOISES[:1] if graph == LYANNA_DRAFT_SINGLE else NOISES
    batch, shape = len(noises), exported.shape
    draft = Draft(exported, graph, batch)
    draft.sizes = {} if graph == LYANNA_DRAFT_SINGLE else {"B": batch}
    for name, values in inputs_of(noises, shape.steps).items():
        draft.engine.bind(name, values)
    histories, rows = [history(8, seed=slot) for slot in range(batch)], [6, 4, 5][:batch]
    found = draft.call(histories, rows, 6)
    for slot, (sequence, end, noise) in enumerate(zip(histories, rows, noises, strict=True)):
        logits = exported.chain_logits(sequence.features[:end], sequence.tokens[: end + 1])
        np.testing.assert_allclose(found[names.CHAIN_LOGITS][slot], logits, atol=1e-4, rtol=1e-4)
        tree = exported.subtree(
            noisy(exported, found[names.CHAIN_LOGITS][slot], noise), int(sequence.tokens[end]), noise.scale
        )
        same_tree(found, slot, tree.top_nodes(shape.nodes))


def resampled(
    exported: Exported, graph: str, logits: np.ndarray, used: list[int], roots: list[int], given: Arrays,
    drawn: bool = False,
) -> Arrays:  # fmt: skip
    engine = open_calls(exported.bundle, graph, threads=1)
    for name, table in exported.tables.items():
        engine.bind(name, table)
    call = engine.prepare(B=len(roots))
    values = {
        names.CHAIN_LOGITS: logits, names.FIRST_STEP: np.array(used), names.TOKENS: np.array(roots),
        names.DRAWN: np.full(len(roots), int(drawn)), **given,
    }  # fmt: skip
    for name, value in values.items():
        call.inputs[name][:] = value
    call.run()
    return {name: array.copy() for name, array in call.outputs.items()}


def chain_of(exported: Exported, batch: int) -> np.ndarray:
    size = (batch, exported.shape.steps, exported.shape.draft_vocabulary)
    return np.random.default_rng(3).normal(scale=2, size=size).astype(np.float32)


@pytest.mark.parametrize("graph", [LYANNA_RESAMPLE, RESAMPLE_BATCH])
def test_resampling_has_the_noise_of_the_positions_after_its_root(exported: Exported, graph: str) -> None:
    """The first noise belongs to the first step that is left, however many steps are used."""
    shape, roots = exported.shape, [3, 11, 8]
    logits = chain_of(exported, len(NOISES))
    for used in range(1, shape.steps):
        found = resampled(exported, graph, logits, [used] * 3, roots, inputs_of(NOISES, shape.steps - 1))
        for slot, (root, noise) in enumerate(zip(roots, NOISES, strict=True)):
            tree = exported.subtree(noisy(exported, logits[slot, used:], noise), root, noise.scale)
            count = found[names.TREE_COUNT][slot]
            same_tree(found, slot, tree.top_nodes(shape.resample_nodes), count)


def test_without_noise_the_cpus_graph_is_the_portable_one_to_the_bit(exported: Exported) -> None:
    silent = tuple(Noise(noise.seed, 0.0, noise.position, noise.scale) for noise in NOISES)
    given = inputs_of(silent, exported.shape.steps - 1)
    logits = chain_of(exported, 3)
    found, portable = (
        resampled(exported, graph, logits, [1, 2, 1], [3, 11, 8], given) for graph in (RESAMPLE_BATCH, LYANNA_RESAMPLE)
    )
    for name, values in portable.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


DRAWS = 4000


def test_drawn_candidates_are_draws_without_replacement_and_their_values_choose_no_node(exported: Exported) -> None:
    """The root's first child is drawn from q, its second from q without the first, whatever the first was."""
    shape, root, temperature = exported.shape, 5, 0.8
    logits = np.repeat(chain_of(exported, 1), DRAWS, axis=0)
    noises = tuple(Noise(seed, temperature, 20, 1 / temperature) for seed in range(DRAWS))
    given = inputs_of(noises, shape.steps - 1)
    given[names.NOISE_KEYS] = keys_of(range(DRAWS), 20, shape.steps - 1, DRAWN)
    found = resampled(exported, RESAMPLE_BATCH, logits, [1] * DRAWS, [root] * DRAWS, given, drawn=True)
    scores = (logits[0, 1] + lookup(exported.tables, root)) / temperature
    q = np.exp(scores - scores.max(), dtype=np.float64)
    q /= q.sum()
    pairs = np.outer(q, q) / (1 - q[:, None])
    np.fill_diagonal(pairs, 0)
    parents, tokens = found[names.TREE_PARENTS], found[names.TREE_TOKENS]
    assert (parents == parents[0]).all()
    assert (found[names.TREE_LOG_PROBS] == found[names.TREE_LOG_PROBS][0]).all()
    first, second = np.flatnonzero(parents[0] == 0)[:2]
    assert found[names.TREE_LOG_PROBS][0, [first, second]].tolist() == [DRAWN_LOG_PROB, 2 * DRAWN_LOG_PROB]
    ids = np.arange(shape.vocabulary) if exported.vocabulary is None else exported.vocabulary
    columns = np.searchsorted(ids, tokens)
    counts = np.zeros((len(ids), len(ids)))
    np.add.at(counts, (columns[:, first], columns[:, second]), 1)
    for found_counts, expected in ((counts.sum(1), q), (counts.ravel(), pairs.ravel())):
        assert deviation(found_counts, expected * DRAWS) < 4.5


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic in standard deviations above its mean. Rare cells are one."""
    rare = expected < 5
    counts, expected = (np.append(values[~rare], values[rare].sum()) for values in (counts, expected))
    return float((((counts - expected) ** 2 / expected).sum() - (len(counts) - 1)) / np.sqrt(2 * (len(counts) - 1)))
