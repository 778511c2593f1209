"""JSON of a checkpoint: numbers that JSON cannot hold, and damage."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from redraft.errors import CheckpointError
from redraft.export.checkpoint.base import read_json_object
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint

LIMITS = {"high": float("inf"), "low": [float("-inf"), {"inner": float("inf")}], "size": 3}


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


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b'{"__float__": "NaN"}', "does not hold a JSON object"),
    ],
)
def test_damaged_files_are_named(content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {match}"):
        Checkpoint.open(tmp_path, weights=False)


def test_reading_a_configuration_does_not_wait_for_transformers() -> None:
    program = (
        "import sys, redraft.export.checkpoint.safetensors; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
