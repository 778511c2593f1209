"""Text that a verifier writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.errors import DataError
from redraft.train.self_text import continue_greedily, prompts_from, write_rows
from tests.export.models import config_of

PROMPTS = np.random.default_rng(0).integers(3, 97, (3, 5))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    return model


def generated(model, prompt, new_tokens, eos=None):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                         eos_token_id=eos, pad_token_id=0)  # fmt: skip
    return out[0].tolist()


def test_greedy_rows_equal_generate(model):
    rows = write_rows(model, PROMPTS, 12, 0.0, 0)
    assert rows.dtype == np.int64
    assert rows.tolist() == [generated(model, prompt, 12) for prompt in PROMPTS.tolist()]


def test_sampling_is_seeded_and_follows_the_temperature(model):
    first, again, other = (write_rows(model, PROMPTS, 12, 1.0, seed) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(first[:, :5], PROMPTS)
    assert np.array_equal(write_rows(model, PROMPTS, 12, 1e-4, 3), write_rows(model, PROMPTS, 12, 0.0, 3))


def test_rows_beyond_one_batch_come_in_order_and_are_counted(model, monkeypatch):
    monkeypatch.setattr("redraft.train.self_text.ROWS_AT_ONCE", 2)
    seen = []
    rows = write_rows(model, PROMPTS, 3, 0.0, 0, lambda done, of: seen.append((done, of)))
    assert seen == [(2, 3), (3, 3)]
    assert rows.tolist() == [generated(model, prompt, 3) for prompt in PROMPTS.tolist()]


def test_prompts_of_any_length_continue_as_each_does_alone(model, monkeypatch):
    """Rows are batched without padding, so a token taken too early or too late would change a text."""
    monkeypatch.setattr("redraft.train.self_text.ROWS_AT_ONCE", 3)
    prompts = [PROMPTS[0].tolist(), PROMPTS[1, :2].tolist(), PROMPTS[2, :4].tolist(), [5]]
    alone = [generated(model, prompt, 10) for prompt in prompts]
    assert continue_greedily(model, prompts, 10, frozenset()) == alone
    eos = alone[0][5 + 3]  # a token that the first text contains
    cut = [generated(model, prompt, 10, eos) for prompt in prompts]
    assert continue_greedily(model, prompts, 10, frozenset([eos])) == cut
    assert len(cut[0]) < len(alone[0])


def test_prompts_are_stretches_of_the_stream():
    stream = np.arange(1000)
    prompts = prompts_from(stream, 20, 7, 1)
    assert prompts.shape == (20, 7)
    assert (np.diff(prompts) == 1).all()
    assert len(set(prompts[:, 0].tolist())) > 10
    assert np.array_equal(prompts, prompts_from(stream, 20, 7, 1))
    with pytest.raises(DataError, match="7 tokens, too few for prompts of 7"):
        prompts_from(np.arange(7), 1, 7, 0)
