"""A draft model's configuration and names are those of transformers' model with some of the verifier's layers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from redraft.errors import CheckpointError, UsageError
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.decoder_drafter import DraftModel, DraftModelConfig, configuration_of
from redraft.records import from_plain
from tests.export.models import config_of

LAYERS = (0, 2)
KINDS = ["llama", "qwen2", "gemma2", "gpt2"]


def verifier_config(kind, **changes):
    if kind == "gpt2":
        return config_of(kind, n_embd=48, n_layer=3, n_head=4, n_positions=128, **changes)
    return config_of(kind, **changes)


def small(kind, **options):
    return configuration_of(verifier_config(kind), 97, LAYERS, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_transformers_without_embedding_and_head(kind):
    model = DraftModel(small(kind))
    whole = AutoModelForCausalLM.from_config(model.config.transformers)
    embedding = {id(module.weight) for module in (whole.get_input_embeddings(), whole.get_output_embeddings())}
    names = {name for name, value in whole.state_dict(keep_vars=True).items() if id(value) not in embedding}
    assert set(model.state_dict()) == names
    assert any(".1." in name for name in names)
    assert not any(".2." in name for name in names)


def test_lists_with_an_item_a_layer_keep_the_items_of_these_layers():
    verifier = verifier_config("gemma2")
    assert verifier.layer_types == ["sliding_attention", "full_attention"] * 2
    found = configuration_of(verifier, 97, (0, 1, 3)).transformers
    assert found.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert (found.num_hidden_layers, found.sliding_window, found.model_type) == (3, 8, "gemma2")
    assert verifier.num_hidden_layers == 4  # its own configuration stays


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_goes_through_a_drafters_folder(kind, tmp_path):
    config = small(kind, draft_vocab_size=40)
    assert from_plain(DraftModelConfig, json.loads(json.dumps(asdict(config))), "") == config
    torch.manual_seed(0)
    saved, vocabulary = DraftModel(config), torch.arange(0, 80, 2)
    identity = Identity(("weights",), "tokenizer")
    save_drafter(tmp_path, "draft_model", config, identity, saved, torch.arange(97), {}, vocabulary, "int8")
    checkpoint = DrafterCheckpoint.open(tmp_path)
    assert checkpoint.configure(DraftModelConfig) == config
    loaded = DraftModel(checkpoint.configure(DraftModelConfig))
    assert torch.equal(checkpoint.load(loaded).draft_vocabulary, vocabulary)
    rows = torch.randn(1, 9, 48)
    with torch.no_grad():
        error = (loaded.eval()(rows) - saved.eval()(rows)).norm() / saved(rows).norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "one or more numbers in ascending order"),
        ((2, 0), r"in ascending order, not \[2, 0\]"),
        ((1, 1), "in ascending order"),
        ((0, 3), r"numbers from 0 to 2, those of the verifier, not \[0, 3\]"),
        ((-1, 2), "numbers from 0 to 2"),
    ],
)
def test_layers_that_the_verifier_lacks_are_refused(layers, message):
    with pytest.raises(CheckpointError, match=message):
        configuration_of(verifier_config("llama"), 97, layers)


def test_a_configuration_that_is_not_one_of_transformers_is_refused():
    values = asdict(small("llama"))
    with pytest.raises(CheckpointError, match="has 3 layers, expected 2"):
        _ = DraftModelConfig(**values | {"model": values["model"] | {"num_hidden_layers": 3}}).transformers
    with pytest.raises(CheckpointError, match="is not one of transformers"):
        _ = DraftModelConfig(**values | {"model": {"model_type": "absent"}}).transformers
    with pytest.raises(CheckpointError, match="draft_vocab_size must be from 0 to 97"):
        small("llama", draft_vocab_size=98)
    with pytest.raises(UsageError, match="missing key model"):
        from_plain(DraftModelConfig, {"hidden_size": 48, "vocab_size": 97, "layers": [0]}, "config.json")
