"""Batches of whole written texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.errors import DataError
from redraft.train.config import Recipe
from redraft.train.drafter_config import DrafterRecipe, SelfText
from redraft.train.states import States
from redraft.train.text_batches import TextPlan, WrittenText, text_batch
from redraft.train.text_shards import Shards, pack, save_facts

TEXTS = 60
KINDS = ("chat", "math")


def shard(number, count, states=True):
    rng = np.random.default_rng(number)
    prompts = rng.integers(2, 6, count)
    lengths = prompts + rng.integers(3, 9, count)
    total = int(lengths.sum())
    arrays = {
        "tokens": rng.integers(0, 50, total).astype(np.uint32),
        "lengths": lengths,
        "prompts": prompts,
        "kinds": np.array([KINDS[i % 2] for i in range(count)]),
        "temperatures": np.array([float(i % 3 == 0) for i in range(count)], np.float32),
    }
    if states:
        arrays |= {
            **stored(rng.normal(size=(total, 4)), rng.integers(0, 50, (total, 3)), rng.normal(size=total)),
        }
    return arrays


def stored(hidden, ids, log_sum):
    """The arrays of states with these hidden states, likeliest tokens and sums."""
    hidden, ids, log_sum = (torch.from_numpy(np.asarray(array)) for array in (hidden, ids, log_sum))
    return States({"last": hidden}, ids, torch.ones(ids.shape), log_sum.float()).to_numpy()


def texts_in(folder, held_out_every, **fields):
    return WrittenText(folder, DrafterRecipe(held_out_every=held_out_every, **fields), ("last",))


@pytest.fixture
def folder(tmp_path):
    for number in range(2):
        Shards(tmp_path).add(number, shard(number, TEXTS // 2))
    save_facts(tmp_path, {})
    return tmp_path


def test_a_text_is_trained_on_or_held_out_with_all_answers_to_its_prompt(tmp_path):
    """The same prompt is asked again at another temperature; one of the two in training would leak the other."""
    arrays = shard(0, TEXTS, states=False)
    twice = {
        name: np.concatenate([array, array]) if name != "temperatures" else np.concatenate([array * 0, array * 0 + 1])
        for name, array in arrays.items()
    }
    Shards(tmp_path).add(0, twice)
    texts = texts_in(tmp_path, 4)
    assert len(texts.training) + len(texts.held_out_texts) == 2 * TEXTS
    assert 0.1 < len(texts.held_out_texts) / (2 * TEXTS) < 0.5
    places = [
        {text.first % int(arrays["lengths"].sum()) for text in some} for some in (texts.training, texts.held_out_texts)
    ]
    assert not places[0] & places[1]


def test_counts_and_sizes_are_of_answers_in_training(folder):
    texts = texts_in(folder, 5)
    counts, sizes = texts.counts(50), {kind: found["tokens"] for kind, found in texts.facts().items()}
    assert counts.sum() == sum(kind["written"] for kind in sizes.values())
    assert sum(kind["texts"] for kind in sizes.values()) == len(texts.training)
    assert sum(kind["all"] for kind in sizes.values()) == sum(text.length for text in texts.training)


def test_a_batch_has_the_texts_their_starts_and_their_states():
    arrays = [
        {"tokens": np.array([5, 6, 7, 8], np.uint32), **stored(np.ones((4, 2)), np.full((4, 3), 9), np.full(4, 2.0))},
        {"tokens": np.arange(1, 7, dtype=np.uint32), **stored(np.full((6, 2), 3), np.full((6, 3), 4), np.full(6, 5.0))},
    ]
    batch = text_batch(arrays, [1, 2], ("chat", "math"))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert batch.starts.tolist() == [[0, 1, -1], [1, 2, 3]]
    assert batch.ends.tolist() == [3, 5]  # the last token has no next one
    assert batch.states.last[1, 5].tolist() == [3, 3]
    assert batch.states.greedy[0].tolist() == [9, 9, 9, 9, 0, 0]
    for array in arrays:
        del array["log_sum"]
    assert text_batch(arrays, [1, 2], ("chat", "math")).states is None


def test_an_epoch_has_every_text_once_in_batches_of_similar_lengths(folder, monkeypatch):
    monkeypatch.setattr("redraft.train.text_batches._SORTED", 4)
    texts = texts_in(folder, 6)
    rows = 4
    batches = len(texts.training) // rows
    plan = TextPlan(texts, rows, seed=3)
    orders = [
        [plan.batch(step, Recipe()) for step in range(batches * epoch, batches * (epoch + 1))] for epoch in (0, 1)
    ]
    seen = [sorted(tuple(row) for batch in order for row in _texts(batch)) for order in orders]
    assert len(seen[0]) == len(set(seen[0])) == batches * rows
    assert [b.tokens.tolist() for b in orders[0]] != [b.tokens.tolist() for b in orders[1]]
    spread = [int(batch.ends.max() - batch.ends.min()) for batch in orders[0]]
    every = [text.length for text in texts.training]
    assert np.mean(spread) < 0.6 * (max(every) - min(every))
    again = TextPlan(texts_in(folder, 6), rows, seed=3)
    assert torch.equal(again.batch(batches + 1, Recipe()).tokens, orders[1][1].tokens)
    assert orders[0][0].states is not None


def _texts(batch):
    return [row[: end + 1] for row, end in zip(batch.tokens.tolist(), batch.ends.tolist(), strict=True)]


def test_held_out_batches_are_greedy_and_by_kind(folder):
    held_out = texts_in(folder, 2, self_text=SelfText(held_out_rows=3)).held_out(0)
    assert set(held_out) == set(KINDS)
    for kind, batches in held_out.items():
        assert sum(len(batch.kinds) for batch in batches) <= 3
        assert all(set(batch.kinds) == {kind} for batch in batches)
    texts = texts_in(folder, 2).held_out_texts
    greedy = {
        tuple(text.shard.array("tokens")[text.first : text.first + text.length].tolist())
        for text in texts
        if text.temperature == 0
    }
    assert len(greedy) < len(texts)
    assert all(tuple(row) in greedy for batches in held_out.values() for batch in batches for row in _texts(batch))


def test_a_run_may_learn_from_sampled_answers_alone(folder):
    """What is held out stays the same."""
    whole = texts_in(folder, 4)
    some = {answers: texts_in(folder, 4, answers=answers) for answers in ("greedy", "sampled")}
    assert sum(len(texts.training) for texts in some.values()) == len(whole.training)
    assert {text.temperature for text in some["greedy"].training} == {0.0}
    assert {text.temperature for text in some["sampled"].training} == {1.0}
    for texts in some.values():
        assert [(text.first, text.length) for text in texts.held_out_texts] == [
            (t.first, t.length) for t in whole.held_out_texts
        ]
    assert all(texts.digest == whole.digest for texts in some.values())


def test_packed_texts_are_the_same_texts_without_states(folder, tmp_path):
    pack(folder, tmp_path / "packed")
    whole, packed = (texts_in(path, 6) for path in (folder, tmp_path / "packed"))
    assert whole.digest == packed.digest
    assert [t.kind for t in whole.training] == [t.kind for t in packed.training]
    one, other = (TextPlan(texts, 4, 0).batch(2, Recipe()) for texts in (whole, packed))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.starts, other.starts)
    assert (one.states is None, other.states is None) == (False, True)


def test_texts_that_are_missing_or_too_few_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match="has no texts to train on"):
        texts_in(tmp_path / "absent", 4)
    with pytest.raises(DataError, match="fewer than the 99 of a batch"):
        TextPlan(texts_in(folder, 4), 99, 0)
