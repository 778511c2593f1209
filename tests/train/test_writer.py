"""Texts written in batches equal those that the model writes alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.train.states import States
from redraft.train.text_shards import split
from redraft.train.writer import TextStart, Writer, continue_greedily, write_rows
from tests.export.models import config_of

LENGTHS = (5, 2, 7, 3, 2)
NEW = 12


def model_of(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def prompts(temperature=0.0):
    rng = np.random.default_rng(1)
    return [TextStart(tuple(rng.integers(3, 97, length).tolist()), temperature) for length in LENGTHS]


def alone(model, prompt, ends=()):
    tokens = list(prompt.tokens)
    with torch.inference_mode():
        while len(tokens) < len(prompt.tokens) + NEW:
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] in ends:
                break
    return tokens


def texts_of(written):
    return [text.tolist() for text in split(written.lengths, written.tokens)]


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_greedy_texts_equal_those_of_single_rows(kind):
    """Also with sliding windows, softcaps, and query heads that share key heads."""
    model = model_of(kind)
    written = Writer(model, frozenset(), NEW).write(prompts(), 0)
    assert texts_of(written) == [alone(model, prompt) for prompt in prompts()]
    assert written.prompts.tolist() == list(LENGTHS)
    assert not written.states


def test_rows_end_at_their_own_ends_and_leave_the_batch(model):
    """A row that ends early must neither stop the others nor change them. An end inside a prompt does not end it."""
    whole = [alone(model, prompt) for prompt in prompts()]
    ends = frozenset({whole[0][5 + 2], whole[3][3 + 6], *prompts()[0].tokens[1:3]})
    expected = [alone(model, prompt, ends) for prompt in prompts()]
    assert len({len(text) - length for text, length in zip(expected, LENGTHS, strict=True)}) > 2
    assert texts_of(Writer(model, ends, NEW).write(prompts(), 0)) == expected


def test_temperatures_are_of_a_row_and_sampling_is_seeded(model):
    greedy, sampled = prompts(), prompts(1.0)
    mixed = [greedy[0], sampled[1], greedy[2], sampled[3], sampled[4]]
    writer = Writer(model, frozenset(), NEW)
    first, again, other = (texts_of(writer.write(mixed, seed)) for seed in (3, 3, 4))
    assert first == again
    assert [first[i] for i in (0, 2)] == [alone(model, greedy[i]) for i in (0, 2)]
    assert first[1] != other[1]


def test_samples_follow_the_models_distribution(model):
    """Frequencies of one sampled token are its probabilities, up to the noise of 4000 draws."""
    prompt = prompts(1.0)[0]
    written = Writer(model, frozenset(), 1).write([prompt] * 4000, 0)
    drawn = np.array([text[-1] for text in texts_of(written)])
    with torch.inference_mode():
        top = model(torch.tensor([prompt.tokens])).logits[0, -1].softmax(-1).topk(64)
    expected = (top.values / top.values.sum()).numpy()
    counts = np.array([(drawn == token).sum() for token in top.indices.tolist()])
    assert counts.sum() == 4000
    assert np.abs(counts - 4000 * expected).max() < 5 * np.sqrt(4000 * expected.max())


def test_kept_states_are_those_of_one_pass_over_each_text(model):
    written = Writer(model, frozenset(), NEW, ("last", "1")).write(prompts(), 0)
    assert set(written.states) == {"hidden8.last", "hidden8.1", "top_ids", "top_logits", "log_sum"}
    kept = States.of_tensors({name: torch.from_numpy(array) for name, array in written.states.items()}).hidden
    arrays = {**written.states, **{name: rows.numpy() for name, rows in kept.items()}}
    flat = {name: split(written.lengths, array) for name, array in arrays.items()}
    for row, text in enumerate(texts_of(written)):
        with torch.inference_mode():
            out = model(torch.tensor([text]), output_hidden_states=True)
        logits = out.logits[0]
        for name, rows in (("1", out.hidden_states[2][0]), ("last", out.hidden_states[-1][0])):
            assert np.allclose(flat[name][row], rows, atol=float(rows.abs().max()) / 250)  # half a step of 8 bits
        assert np.allclose(flat["log_sum"][row], logits.logsumexp(-1), atol=1e-3)
        assert np.allclose(flat["top_logits"][row], logits.topk(64).values, atol=2e-2)
        assert flat["top_ids"][row][:, 0].tolist() == logits.argmax(-1).tolist()


def test_rows_beyond_one_batch_come_in_order_and_are_counted(model, monkeypatch):
    monkeypatch.setattr("redraft.train.writer._ROWS_AT_ONCE", 2)
    rows, seen = np.random.default_rng(0).integers(3, 97, (3, 5)), []
    written = write_rows(model, rows, NEW, 0.0, 0, lambda done, of: seen.append((done, of)))
    assert seen == [(2, 3), (3, 3)]
    assert written.dtype == np.int64
    assert written.tolist() == [alone(model, TextStart(tuple(row))) for row in rows.tolist()]
    first, again, other = (write_rows(model, rows, NEW, 1.0, seed) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(write_rows(model, rows, NEW, 1e-4, 3), written)


def test_prompts_of_any_length_continue_as_each_does_alone(model, monkeypatch):
    """Rows are batched without padding, so a token taken too early or too late would change a text."""
    monkeypatch.setattr("redraft.train.writer._ROWS_AT_ONCE", 3)
    texts = [alone(model, prompt) for prompt in prompts()]
    given = [prompt.tokens for prompt in prompts()]
    assert continue_greedily(model, given, NEW, frozenset()) == texts
    ends = frozenset([texts[0][5 + 3]])  # a token that the first text contains
    cut = [alone(model, prompt, ends) for prompt in prompts()]
    assert continue_greedily(model, given, NEW, ends) == cut
    assert len(cut[0]) < len(texts[0])
