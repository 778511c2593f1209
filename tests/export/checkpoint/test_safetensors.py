"""Reading checkpoints finds and names damage without loading weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from redraft.errors import CheckpointError
from redraft.export.checkpoint.base import read_json_object
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from tests.export.models import write_checkpoint

LIMITS = {"high": float("inf"), "low": [float("-inf"), {"inner": float("inf")}], "size": 3}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several shards with an index."""
    return write_checkpoint(tmp_path_factory.mktemp("stored") / "model", "llama", shard_size="100KB")


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, which a test may change."""
    return Path(shutil.copytree(stored, tmp_path / "model"))


def put_in_index(folder: Path, name: str, file: str) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(content))


def one_file(folder: Path, content: bytes) -> None:
    """Let the folder have one weight file with this content."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("indexed", [False, True])
def test_auxiliary_tensors_are_left_out(folder: Path, indexed: bool) -> None:
    save_file({"mtp.projection.weight": torch.zeros(2)}, folder / "mtp.safetensors")
    if indexed:
        put_in_index(folder, "mtp.projection.weight", "mtp.safetensors")
    assert not [name for name in Checkpoint.open(folder).tensors if name.startswith("mtp.")]


def test_other_formats_next_to_the_model_are_ignored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert Checkpoint.open(folder).files == ("model.safetensors",)


def test_a_configuration_opens_without_weights(folder: Path) -> None:
    one_file(folder, b"")
    (folder / "model.safetensors").unlink()
    assert Checkpoint.open(folder, weights=False).tensors == {}


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "is not a directory"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "not a Hugging Face checkpoint"),
    "no shard": (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), r"model-00002\S* is missing"),
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")],
        r"no \*\.safetensors",
    ),
    "not in its shard": (
        lambda folder: put_in_index(folder, "model.layers.9.w", next(folder.glob("*.safetensors")).name),
        r"model\.layers\.9\.w is in the index but in no shard",
    ),
    "parent": (lambda folder: put_in_index(folder, "lm_head.weight", "../a.safetensors"), "outside the checkpoint"),
    "absolute": (lambda folder: put_in_index(folder, "lm_head.weight", "/etc/passwd"), "outside the checkpoint"),
    "no index": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(folder: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    """Files end inside the length, inside the header, and one byte before the end."""
    file = sorted(folder.glob("*.safetensors"))[0]
    one_file(folder, file.read_bytes()[:keep])
    (folder / INDEX).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{ half a", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b'{"__float__": "NaN"}', "does not hold a JSON object"),
    ],
)
def test_a_damaged_configuration_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {message}"):
        Checkpoint.open(tmp_path, weights=False)


def test_infinite_numbers_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    LlamaConfig(limits=LIMITS, unset=float("nan")).save_pretrained(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text(), "transformers no longer uses this form"
    checkpoint = Checkpoint.open(tmp_path, weights=False)
    assert checkpoint.config["limits"] == LIMITS
    assert math.isnan(checkpoint.config["unset"])
    assert load_config(checkpoint).limits == LlamaConfig.from_pretrained(tmp_path).limits == LIMITS


@pytest.mark.parametrize(
    "value",
    [{"__float__": "Huge"}, {"__float__": 1}, {"__float__": "NaN", "b": 1}, {"__float__": {"__float__": "x"}}],
    ids=str,
)
def test_objects_that_only_look_alike_stay_objects(value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": value}))
    assert read_json_object(tmp_path / "config.json") == {"a": value}
    assert LlamaConfig._dict_from_json_file(tmp_path / "config.json") == {"a": value}
