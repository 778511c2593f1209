"""The checkpoint of the memory measurement exports; figures come from a small one."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import export_memory
from redraft.export.checkpoint.safetensors import Checkpoint


def test_written_checkpoint_is_sharded_and_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"WIDE": 32, "INNER": 64, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 8, "VOCABULARY": 100}
    for name, value in {**small, "SHARD_BYTES": 50_000}.items():
        monkeypatch.setattr(export_memory, name, value)
    written, _ = export_memory.write_checkpoint(tmp_path, 200_000)
    checkpoint = Checkpoint.open(tmp_path)
    assert written >= 200_000
    assert checkpoint.parameter_bytes == written
    assert len(checkpoint.files) > 3
    assert checkpoint.memmap("model.layers.0.mlp.up_proj.weight").std() == pytest.approx(0.02, rel=0.1)
