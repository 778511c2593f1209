"""Verifiers for training drafters, and refusals of others by name."""

from __future__ import annotations

import hashlib
import shutil

import pytest
import torch
from tokenizers import Tokenizer

from redraft.errors import CheckpointError, UnsupportedModelError, UsageError
from redraft.train.objectives import find_training
from redraft.train.states import run_verifier, states_of, states_of_tokens
from redraft.train.verifier_model import check_device, open_verifier
from tests.export.gguf_files import random_file
from tests.export.models import write_checkpoint

TRAINING = find_training("lyanna")

VOCAB = 400


def checkpoint(folder, tokenizer_of, architecture, **changes):
    """A random checkpoint whose vocabulary is the fixture tokenizer's."""
    write_checkpoint(folder, architecture, **({"vocab_size": VOCAB} | changes))
    shutil.copy(tokenizer_of / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "changes", "scale"),
    [
        ("llama", {"rms_norm_eps": 1e-4}, 1.0),
        ("cohere", {"logit_scale": 0.25}, 0.25),
        ("granite", {"logits_scaling": 4.0}, 0.25),
    ],
)
def test_shape_and_scale_of_the_logits_go_to_the_drafter(tmp_path, verifier_folder, architecture, changes, scale):
    found = open_verifier(checkpoint(tmp_path / "v", verifier_folder, architecture, **changes), "cpu")
    config = TRAINING.configure(TRAINING.recipe(), found)
    assert config.logit_scale == scale
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, 48, 80)
    head_dim = getattr(found.config, "head_dim", None) or 12
    assert (config.heads, config.kv_heads, config.head_dim) == (4, found.config.num_key_value_heads, head_dim)
    assert not found.model.training
    assert next(found.model.parameters()).dtype == torch.float32
    if architecture == "llama":
        assert (config.rope_theta, config.rms_norm_eps) == (500.0, 1e-4)
    tokens = torch.arange(150).reshape(3, 50)
    with torch.inference_mode():
        states = states_of_tokens(found.model, tokens, ("last",))
        expected = states_of(*run_verifier(found.model, tokens, ("last",)))
    torch.testing.assert_close((states.top_logits, states.log_sum), (expected.top_logits, expected.log_sum))
    assert torch.equal(states.last, expected.last)


def test_head_with_a_bias_is_refused_by_name(tmp_path, verifier_folder):
    folder = checkpoint(tmp_path / "v", verifier_folder, "phi", hidden_size=64, partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match="LM head of phi has a bias"):
        open_verifier(folder, "cpu")


def test_softcapped_logits_are_refused_by_name(tmp_path, verifier_folder):
    """A drafter's logits would have another scale than the logits that it learns."""
    with pytest.raises(UnsupportedModelError, match="logits of gemma2 are not"):
        open_verifier(checkpoint(tmp_path / "v", verifier_folder, "gemma2"), "cpu")


def test_tokenizer_must_be_there_and_fit(tmp_path, verifier_folder):
    folder = checkpoint(tmp_path / "v", verifier_folder, "llama", vocab_size=VOCAB - 1)
    with pytest.raises(CheckpointError, match="has 400 tokens, more than the 399 of the model"):
        open_verifier(folder, "cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        open_verifier(folder, "cpu")


def test_truncation_and_padding_left_in_the_tokenizer_are_ignored(tmp_path, verifier_folder):
    folder = checkpoint(tmp_path / "v", verifier_folder, "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = tokenizer.encode("def step(self, batch): return batch").ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert open_verifier(folder, "cpu").tokenizer.encode("def step(self, batch): return batch").ids == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(UsageError, match="--device cpu"):
        check_device("cuda")


def test_a_gguf_file_is_a_verifier_with_its_own_tokenizer_and_template(tmp_path):
    """Its weights are the dequantized ones, and a tokenizer.json next to it is not its own."""
    file = random_file("llama", "Q8_0")
    file.write(tmp_path / "model.gguf")
    (tmp_path / "tokenizer.json").write_text("of another model")
    found = open_verifier(tmp_path / "model.gguf", "cpu")
    assert found.identity.tokenizer == ""
    assert found.identity.weights == (hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest(),)
    exact = file.model.get_output_embeddings().weight
    stored = found.model.get_output_embeddings().weight
    assert torch.allclose(stored, exact, atol=0.02)
    assert not torch.equal(stored, exact)
    assert (found.texts / "tokenizer.json").exists()
    assert found.texts != tmp_path
