"""Symbolic tensors: operations that give stored tensors, and operations that give expressions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint.safetensors import Checkpoint, read_header
from redraft.export.checkpoint.stored_tensor import StoredTensor, entries, evaluate, narrow, select

SHAPES = {"a": (6, 4), "b": (6, 4), "fused": (3, 8, 4), "half": (6, 4)}


@pytest.fixture
def stored(tmp_path: Path):
    """(checkpoint, symbolic tensors by name, real tensors by name)."""
    real = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    real["half"] = real["half"].bfloat16()
    save_file(real, tmp_path / "model.safetensors")
    found = {entry.name: entry for entry in read_header(tmp_path / "model.safetensors")}
    return Checkpoint(tmp_path, {}, found), {n: StoredTensor.of(e) for n, e in found.items()}, real


def agrees(checkpoint, symbolic, expected) -> bool:
    return np.array_equal(evaluate(symbolic, checkpoint), expected.float().numpy())


def test_part_of_a_stack_is_the_stored_tensor(stored):
    _, symbolic, _ = stored
    stack = torch.stack([symbolic["a"], symbolic["b"]], dim=0)
    assert select(stack, 1) is symbolic["b"]


def test_part_of_merged_experts_is_the_stored_tensor(stored):
    """Merge like transformers: gates stacked, ups stacked, both concatenated along the rows."""
    _, symbolic, _ = stored
    merged = torch.cat([torch.stack([symbolic["a"]]), torch.stack([symbolic["b"]])], dim=1)
    assert merged.shape == (1, 12, 4)
    assert narrow(select(merged, 0), 6, 12) is symbolic["b"]


def test_contiguous_part_of_a_stored_tensor_lies_in_the_file(stored):
    checkpoint, symbolic, real = stored
    part = narrow(select(symbolic["fused"], 2), 4, 8)
    assert part.entry is not None
    assert part.entry.shape == (4, 4)
    assert agrees(checkpoint, part, real["fused"][2, 4:8])


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t["a"].T,
        lambda t: torch.cat([t["a"], t["half"]], dim=1),
        lambda t: t["fused"].transpose(1, 2).contiguous(),
        lambda t: t["fused"].chunk(2, dim=1)[1],
        lambda t: t["fused"][..., ::2],
        lambda t: torch.split(t["a"], [2, 4], dim=0)[1].to(torch.float32),
        lambda t: t["a"].view(2, 3, 4).permute(1, 0, 2).reshape(6, 4),
        lambda t: -t["b"] + 1,
    ],
)
def test_computed_tensors_equal_torch(stored, operation):
    checkpoint, symbolic, real = stored
    assert agrees(checkpoint, operation(symbolic), operation({k: v.float() for k, v in real.items()}))


def test_parts_name_their_stored_tensors(stored):
    _, symbolic, _ = stored
    made = torch.cat([symbolic["a"], symbolic["b"].flip(0), symbolic["a"]])
    assert [entry.name for entry in entries(made)] == ["a", "b"]


def test_changes_in_place_are_refused(stored):
    _, symbolic, _ = stored
    with pytest.raises(UnsupportedModelError, match="in place"):
        symbolic["a"].add_(1)
