"""A checkpoint's tensors are all used or reported: buffers, renamed, merged, surplus and damaged tensors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from redraft.errors import CheckpointError, RedraftError
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.loading import LoadedTensors, fill_buffers, load_tensors
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint, read_header
from redraft.export.checkpoint.stored_tensor import evaluate
from redraft.export.reference import first_layers
from tests.export.models import export_verifier, write_checkpoint

SMALL = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=48)
ROUTED = dict(
    SMALL, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0, n_group=1,
    topk_group=1, n_shared_experts=1,
)  # fmt: skip
BUFFER = "model.layers.0.mlp.gate.e_score_correction_bias"
GEMMA4 = dict(
    SMALL, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=97,
    hidden_size_per_layer_input=8,
)  # fmt: skip


def load(folder: Path, layers: int | None = None) -> LoadedTensors:
    """The tensors of a folder."""
    checkpoint = Checkpoint.open(folder)
    config = load_config(checkpoint)
    architecture = Architecture.of(config if layers is None else first_layers(config, layers))
    return load_tensors(checkpoint, architecture, partly=layers is not None)


def change(folder: Path, edit) -> Path:
    """Edit the stored tensors of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mixtral", SMALL),
        ("glm4_moe", ROUTED),
        ("granitemoe", dict(SMALL, num_local_experts=4, num_experts_per_tok=2)),
        ("phimoe", dict(SMALL, num_local_experts=4)),
        ("gpt_oss", dict(SMALL, num_local_experts=4)),
        ("gpt_neox", dict(SMALL, head_dim=8)),
        ("gemma4_text", GEMMA4),
    ],
)
def test_values_are_those_that_transformers_loads(tmp_path, architecture, changes):
    """Every parameter and every persistent buffer is equal to the bit."""
    folder = write_checkpoint(tmp_path / "model", architecture, **changes)
    loaded, checkpoint = load(folder), Checkpoint.open(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {**loaded.parameters, **loaded.buffers}
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(evaluate(found[name], checkpoint), value.float().numpy(), err_msg=name)


def test_buffers_are_filled(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "glm4_moe", **ROUTED)
    stored = torch.arange(4, dtype=torch.float32)
    change(folder, lambda tensors: tensors.update({BUFFER: stored}))
    network = AutoModelForCausalLM.from_config(load_config(Checkpoint.open(folder)))
    fill_buffers(network, load(folder).buffers, Checkpoint.open(folder))
    assert torch.equal(dict(network.named_buffers())[BUFFER], stored)


def test_names_of_older_checkpoints_are_renamed(tmp_path):
    """GPT-2 on the Hub has no `transformer.` before its names."""
    folder = write_checkpoint(tmp_path / "model", "gpt2", num_key_value_heads=4, head_dim=12)
    before = load(folder)

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change(folder, rename)
    after = load(folder)
    assert {n: t.entry.shape for n, t in after.parameters.items()} == {
        n: t.entry.shape for n, t in before.parameters.items()
    }


def test_head_that_differs_from_the_embedding_is_used(tmp_path):
    """transformers does not tie two stored tensors that differ, with any config.json."""
    folder = write_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True, **SMALL)
    assert load(folder).tied
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert load(folder).tied
    change(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    loaded = load(folder)
    assert not loaded.tied
    assert loaded.parameters["lm_head.weight"].entry.name == "lm_head.weight"


def test_masks_that_older_models_stored_are_no_surplus(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "gptj", rotary_dim=4, num_key_value_heads=4, head_dim=8, **SMALL)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    stem = "transformer.h.0.attn"
    change(folder, lambda t: t.update({f"{stem}.bias": mask, f"{stem}.masked_bias": torch.tensor(-1e9)}))
    load(folder)
    change(folder, lambda t: t.update({f"{stem}.bias": torch.ones_like(mask)}))
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {stem}.bias that GPTJForCausalLM does not use")):
        load(folder)


def test_first_layers_of_a_checkpoint_leave_the_others(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    layers = {name.split(".")[2] for name in load(folder, layers=2).parameters if ".layers." in name}
    assert layers == {"0", "1"}


UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
SURPLUS = {f"model.extra.{i}.weight": torch.zeros(2) for i in range(6)}
FAULTS = [
    ("llama", {UP: None}, f"has no tensor {UP}"),
    ("llama", {NORM: torch.zeros(7)}, f"tensor {NORM} is [7], config.json requires [32]"),
    ("llama", {NORM: torch.ones(32, dtype=torch.int64)}, f"tensor {NORM} is stored as I64"),
    ("llama", {NORM: torch.zeros(32, dtype=torch.int8)}, f"tensor {NORM} is stored as I8"),
    ("llama", {NORM: torch.zeros(32).to(torch.float8_e4m3fn)}, f"tensor {NORM} is stored as F8_E4M3"),
    ("llama", SURPLUS, "model.extra.3.weight and 2 more that LlamaForCausalLM does not use"),
    ("glm4_moe", {BUFFER: None}, f"has no tensor {BUFFER}"),
    ("glm4_moe", {BUFFER: torch.zeros(3)}, f"tensor {BUFFER} is [3], config.json requires [4]"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), FAULTS)
def test_faults_are_named(tmp_path, architecture, changes, message):
    folder = write_checkpoint(tmp_path / "model", architecture, **(ROUTED if architecture == "glm4_moe" else SMALL))

    def edit(tensors):
        tensors.update(changes)
        for name in [name for name, tensor in tensors.items() if tensor is None]:
            del tensors[name]

    change(folder, edit)
    with pytest.raises(RedraftError, match=re.escape(message)):
        load(folder)


def test_head_of_a_multimodal_folder_is_used(tmp_path):
    """The whole model's configuration is untied; its text model's is tied by default. No vision tensor is surplus."""
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    text = dict(SMALL, **heads, model_type="mistral", vocab_size=97)
    vision = dict(SMALL, model_type="pixtral", num_attention_heads=4, head_dim=8)
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=90, tie_word_embeddings=False)
    config.text_config.tie_word_embeddings = True
    Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    export = export_verifier(Checkpoint.open(tmp_path / "model"), tmp_path)
    assert export.head != export.embedding
    assert {export.head, export.embedding} <= {ref.initializer for ref in export.weights}


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.float16), (float("-inf"), torch.bfloat16)],
)
def test_numbers_that_are_not_finite_are_found(tmp_path, bad, dtype):
    """In a tensor that the bundle uses unchanged, so that no other check reads it."""
    tensor = torch.ones(300, 5, dtype=dtype)
    save_file({"good": tensor, "bad": tensor.clone().index_put_((torch.tensor(299), torch.tensor(4)), torch.tensor(
        bad, dtype=dtype))}, tmp_path / "model.safetensors")  # fmt: skip
    entries = {entry.name: entry for entry in read_header(tmp_path / "model.safetensors")}
    checkpoint = Checkpoint(tmp_path, {}, entries)
    assert checkpoint.is_finite(entries["good"])
    assert not checkpoint.is_finite(entries["bad"])


@pytest.mark.parametrize(("architecture", "name"), [("llama", UP), ("glm4_moe", BUFFER)])
def test_weights_and_buffers_that_are_not_finite_are_refused_by_name(tmp_path, architecture, name):
    folder = write_checkpoint(tmp_path / "model", architecture, **(ROUTED if architecture == "glm4_moe" else SMALL))
    change(folder, lambda tensors: tensors[name].view(-1)[3].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} has a number that is not finite"):
        export_verifier(Checkpoint.open(folder), tmp_path)
