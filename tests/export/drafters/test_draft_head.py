"""The factorized head: exact logits of candidates, scores of others, and factors that fit the states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx.numpy_helper import to_array

from redraft.config import BuildConfig
from redraft.export.checkpoint.model_config import load_config
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.sources import RowsSource
from redraft.export.drafters import find_exporter
from redraft.export.drafters.draft_head import CANDIDATES, DraftHead, factored
from redraft.export.drafters.writing import Target
from redraft.export.graph import tracing
from redraft.methods.static_tree import StaticTreeBuild
from redraft.names import TensorSpec
from tests.engines.sessions import session_of
from tests.export.models import export_verifier, write_checkpoint

TOKENS, HIDDEN, RANK = 4 * CANDIDATES, 24, 6


@dataclass(frozen=True)
class Matrix:
    """A source of one matrix, in slabs of a hundred rows."""

    values: np.ndarray

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"w": self.values.shape}

    def slabs(self, parameter: str) -> Iterator[np.ndarray]:
        return (self.values[start : start + 100] for start in range(0, len(self.values), 100))


def normal(*size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def random_head() -> DraftHead:
    head = DraftHead(TOKENS, HIDDEN, RANK, torch.float32)
    for seed, parameter in enumerate(head.parameters()):
        parameter.copy_(torch.from_numpy(normal(*parameter.shape, seed=seed)))
    return head


def factors(source: object, parameter: str, moment: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a matrix, and their names and sizes as written."""
    made = factored(source, parameter, RANK, "d.head.", moment)  # type: ignore[arg-type]
    left, right = (np.concatenate([*made.slabs(f"d.head.{name}")]) for name in ("left", "right"))
    assert made.parameters == {"d.head.left": left.shape, "d.head.right": right.shape}
    return left, right


def test_only_candidates_have_exact_logits() -> None:
    head = random_head()
    assert head.left is not None
    assert head.right is not None
    states = torch.from_numpy(normal(2, 3, HIDDEN, seed=4))
    scores, exact = F.linear(F.linear(states, head.right), head.left), F.linear(states, head.weight)
    is_candidate = scores >= scores.topk(CANDIDATES, -1).values[..., -1:]
    expected = torch.where(is_candidate, exact, scores)
    torch.testing.assert_close(head(states), expected)
    assert float((exact - scores).abs().mean()) > 1, "scores must differ from logits"


def test_a_graph_computes_the_same(tmp_path: Path) -> None:
    """On ONNX Runtime, for any number of rows."""
    head = random_head()
    rows = torch.export.Dim("T", min=1)
    states = TensorSpec("states", "float32", ("B", "T", HIDDEN))
    logits = TensorSpec("logits", "float32", ("B", "T", TOKENS))
    model = tracing.trace_graph(head, (torch.zeros(2, 3, HIDDEN),), ({1: rows},), (states,), (logits,))
    ir.save(model, tmp_path / "head.onnx")
    session = session_of(tmp_path / "head.onnx")
    for count in (1, 4):
        given = normal(2, count, HIDDEN, seed=count)
        (found,) = session.run(None, {"states": given})
        np.testing.assert_allclose(found, head(torch.from_numpy(given)).numpy(), atol=1e-4)


def test_without_a_rank_all_logits_are_exact() -> None:
    head = DraftHead(5, HIDDEN, 0, torch.float32)
    head.weight.copy_(torch.from_numpy(normal(5, HIDDEN)))
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    states = torch.from_numpy(normal(1, 2, HIDDEN, seed=1))
    assert torch.equal(head(states), F.linear(states, head.weight))


def test_factors_are_exact_for_states_of_few_directions() -> None:
    """States that lie in RANK directions. The plain SVD keeps other directions, those of the largest rows."""
    head, directions = normal(TOKENS, HIDDEN), normal(RANK, HIDDEN, seed=1)
    head[:, HIDDEN // 2 :] *= 9
    directions[:, HIDDEN // 2 :] /= 9
    states = normal(500, RANK, seed=2) @ directions
    left, right = factors(Matrix(head), "w", states.T.astype(np.float64) @ states)
    plain_left, plain_right = factors(Matrix(head), "w", None)
    exact = states @ head.T
    np.testing.assert_allclose(states @ right.T @ left.T, exact, atol=1e-2 * exact.std())
    assert np.abs(states @ plain_right.T @ plain_left.T - exact).mean() > 0.2 * exact.std()


def test_without_states_the_factors_are_the_plain_svd() -> None:
    """Of the rows of a draft vocabulary, if the head has these alone."""
    head, rows = normal(TOKENS, HIDDEN), np.arange(3, 400, 7)
    left, right = factors(RowsSource(Matrix(head), "w", "r", rows), "r", None)  # type: ignore[arg-type]
    u, s, v = np.linalg.svd(head[rows].astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(left @ right, (u[:, :RANK] * s[:RANK]) @ v[:RANK], atol=1e-4)


def test_the_error_over_the_states_is_the_least() -> None:
    """No other matrix of the rank is nearer: of 200 ones around it, on the same states."""
    head, states = normal(TOKENS, HIDDEN), normal(300, HIDDEN, seed=1) * np.linspace(0.1, 3, HIDDEN, dtype=np.float32)
    left, right = factors(Matrix(head), "w", states.T.astype(np.float64) @ states)

    def error(left: np.ndarray, right: np.ndarray) -> float:
        return float(np.square(states @ (head - left @ right).T, dtype=np.float64).sum())

    least = error(left, right)
    for seed in range(100):
        nearby = right + 0.02 * np.abs(right).mean() * normal(*right.shape, seed=seed)
        assert error(left, nearby) > least
        assert error(left + 0.02 * normal(*left.shape, seed=seed), right) > least


def test_the_rows_of_an_int8_verifiers_head_are_its_codes(tmp_path: Path) -> None:
    """A drafter adds the factors alone to the bundle."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "verifier", "llama", hidden_size=64))
    (out := tmp_path / "out").mkdir()
    verifier = export_verifier(checkpoint, out, BuildConfig(precision="int8", hidden_states=("last",)))
    target = Target("m", verifier, out, StaticTreeBuild(nodes=3, head_rank=4))
    drafter = find_exporter("medusa").random(target, load_config(checkpoint))
    graph = onnx.load(out / "m.draft.onnx").graph
    (lookup,) = [node for node in graph.node if node.op_type == "GatherBlockQuantized"]
    assert lookup.input[0] == f"{verifier.head}.rows"
    arrays = {value.name: to_array(value) for value in graph.initializer}
    codes = next(ref for ref in verifier.weights if ref.initializer == f"{verifier.head}.codes")
    stored = np.fromfile(out / codes.file, np.uint8, codes.length, offset=codes.offset)
    assert np.array_equal(arrays[lookup.input[0]].ravel(), stored)
    assert not [ref for ref in drafter.weights if ref.initializer.startswith(verifier.head)]
    assert {name for name in arrays if "head." in name and name.startswith("m.")} == {
        f"m.head.{factor}.{part}" for factor in ("left", "right") for part in ("codes", "scales")
    }
