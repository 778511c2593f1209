"""Reading checkpoints finds and names damage without loading weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from tests.export.models import write_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several shards with an index."""
    folder = write_checkpoint(tmp_path / "model", "llama", shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_tensors_are_the_stored_ones(sharded):
    stored = {k: v for file in sharded.glob("*.safetensors") for k, v in load_file(file).items()}
    checkpoint = Checkpoint.open(sharded)
    assert set(checkpoint.tensors) == set(stored)
    for name, tensor in stored.items():
        np.testing.assert_array_equal(checkpoint.memmap(name), tensor.numpy())


def test_auxiliary_tensors_are_left_out(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    save_file({"mtp.projection.weight": torch.zeros(2)}, folder / "mtp.safetensors")
    assert not [name for name in Checkpoint.open(folder).tensors if name.startswith("mtp.")]


def test_auxiliary_tensors_may_be_indexed(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["mtp.projection.weight"] = "mtp.safetensors"
    index.write_text(json.dumps(content))
    save_file({"mtp.projection.weight": torch.zeros(2)}, sharded / "mtp.safetensors")
    assert Checkpoint.open(sharded).tensors


def test_other_formats_next_to_the_model_are_ignored(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert Checkpoint.open(folder).files == ("model.safetensors",)


def test_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(tmp_path / "nowhere")


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="not a Hugging Face checkpoint"):
        Checkpoint.open(tmp_path)


def test_config_is_not_json(sharded):
    (sharded / "config.json").write_text("{ half a")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        Checkpoint.open(sharded)


def test_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing"):
        Checkpoint.open(sharded)


def test_no_weights_at_all(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_named(tmp_path, keep):
    """Files end inside the length, inside the header, and one byte before the end."""
    file = write_checkpoint(tmp_path / "model", "llama") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        Checkpoint.open(file.parent)


def test_tensor_missing_from_its_shard(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"layers\.9\.mlp\.up_proj\.weight is in the index but in no shard"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd"])
def test_index_must_not_leave_the_folder(sharded, file):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
        {"dtype": "F99", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4, True], "data_offsets": [0, 16]},
        [],
    ],
    ids=["size", "dtype", "no-offsets", "float", "bool", "no-object"],
)
def test_damaged_header_is_refused(tmp_path, entry):
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match="damaged header"):
        Checkpoint.open(tmp_path)
