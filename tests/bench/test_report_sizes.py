"""Products of a drafter's graphs worked by hand, and the training of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from redraft.bench.report_sizes import _training, drafter_sizes, matrix_products


def test_products_are_those_of_every_use_of_a_matrix(tmp_path: Path) -> None:
    """A matrix of 4 × 3 is used twice, one of 3 × 2 in 8 bits once, and a product of two inputs has no weights."""
    weights = onnx.numpy_helper.from_array(np.zeros((4, 3), np.float32), "w")
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"]),
        onnx.helper.make_node("MatMul", ["y", "w"], ["b"]),
        onnx.helper.make_node("MatMul", ["a", "b"], ["c"]),
        onnx.helper.make_node("MatMulNBits", ["c", "q", "s"], ["d"], domain="com.microsoft", K=3, N=2),
    ]
    path = tmp_path / "graph.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], [], [weights])), path)
    assert matrix_products(path) == 2 * 12 + 6


def test_training_of_a_drafter_is_of_the_folder_that_it_was_built_from(tmp_path: Path) -> None:
    training = {"step": 7, "spent": {"tokens": 800, "seconds": 9.0}}
    (tmp_path / "config.json").write_text(json.dumps({"training": training}))
    manifest: Any = SimpleNamespace(
        name="other", options=("--drafter", f"one={tmp_path},width=1", "--drafter", "two=gone")
    )
    assert _training(manifest, "one") == {"steps": 7, "tokens": 800, "seconds": 9.0}
    assert _training(manifest, "two") is None
    assert _training(manifest, "three") is None


def test_training_of_a_recipes_drafter_is_of_the_recipes_folder() -> None:
    manifest: Any = SimpleNamespace(name="smollm2-135m", options=("--drafter", "all"))
    assert _training(manifest, "hass-long") == {
        "steps": 400, "tokens": 432_580, "seconds": pytest.approx(882.7, abs=0.1),
    }  # fmt: skip
    assert _training(manifest, "none of it") is None


def test_bytes_are_of_all_files_of_a_drafter_and_of_no_other_ones(tmp_path: Path) -> None:
    """Steering has a file of its own. A reference that two graphs share counts once."""
    files = [("a.data", 0, 100), ("a.data", 0, 100), ("a.steer.data", 0, 20), ("a-long.data", 0, 1000)]
    record: Any = SimpleNamespace(
        method="m", hidden_states=(), graphs={}, limits=SimpleNamespace(nodes=1, depth=1),
        weights=[SimpleNamespace(file=file, offset=offset, length=length) for file, offset, length in files],
    )  # fmt: skip
    bundle: Any = SimpleNamespace(
        path=tmp_path, manifest=SimpleNamespace(name="other", options=(), drafters={"a": record})
    )
    assert drafter_sizes(bundle, ["a"])["a"]["bytes"] == 120
