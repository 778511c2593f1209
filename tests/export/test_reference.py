"""The second moment of a model's final hidden states equals that of transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.config import BuildConfig
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.reference import second_moment
from redraft.export.verifier import trace_verifier
from tests.export.models import write_checkpoint


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_states_are_those_that_the_head_reads(architecture: str, tmp_path: Path) -> None:
    """After the final norm, of all rows of all texts. The head computes a single row."""
    folder, texts = write_checkpoint(tmp_path, architecture), [[5, 9, 3, 60], [8, 8, 20, 2]]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        states = model.base_model(torch.tensor(texts)).last_hidden_state.flatten(0, 1).double()
    traced, done = trace_verifier(Checkpoint.open(folder), BuildConfig()), list[tuple[int, int]]()
    found = second_moment(traced, texts, lambda part, whole: done.append((part, whole)))
    np.testing.assert_allclose(found, states.T @ states / 8, rtol=1e-3, atol=1e-4)
    assert done[-1][0] == done[-1][1]
