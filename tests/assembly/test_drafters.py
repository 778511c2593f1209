"""Graphs that a method's exporter writes must fit the method's specification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from redraft.assembly import resolve
from redraft.assembly.drafter_graphs import check_graph
from redraft.assembly.drafters import OpenedDrafter, open_drafter, settings_of
from redraft.assembly.models import Model
from redraft.assembly.options import BuildRequest
from redraft.assembly.resolve import Target, resolve_build
from redraft.config import BuildConfig, DrafterBuild
from redraft.engines.manifest import GraphRecord
from redraft.errors import RedraftError, UnsupportedModelError
from redraft.export.drafters.checkpoint import Identity
from redraft.names import TensorSpec

RECORD = GraphRecord(
    "a.draft.onnx", (TensorSpec("x", "float32", ("B", 4)),), (TensorSpec("y", "int64", ("B", 4)),)
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A graph of x, float32 [B, 4], to y, int64 [B, 4]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, ["B", 4])
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT64)], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / RECORD.file)
    return tmp_path


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (replace(RECORD, file="b.onnx"), "drafter a: expected the file b.onnx, found none"),
        (replace(RECORD, inputs=()), "does not fit its signature: input x missing or unknown"),
        (replace(RECORD, outputs=(*RECORD.outputs, RECORD.inputs[0])), "signature: output x missing or unknown"),
        (
            replace(RECORD, inputs=(TensorSpec("x", "float32", ("B", 5)),)),
            "expected input x float32['B', 5], found FLOAT[0, 4]",
        ),
        (replace(RECORD, inputs=(TensorSpec("x", "float32", ("B",)),)), "expected input x float32['B'], found"),
        (replace(RECORD, inputs=(TensorSpec("x", "float16", ("B", 4)),)), "expected input x float16['B', 4], found"),
        (
            replace(RECORD, outputs=(TensorSpec("y", "int32", ("B", 4)),)),
            "expected output y int32['B', 4], found INT64",
        ),
    ],
)
def test_a_specification_that_a_graph_does_not_fit(folder: Path, record: GraphRecord, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        check_graph(folder, record, "drafter a")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (DrafterBuild("a", "random"), "drafter a: random weights need a method; add method=, one of "),
        (DrafterBuild("a", "random", "ngram"), "drafter a: method ngram needs no drafter"),
        (DrafterBuild("a", "random", "absent"), "unknown drafting method 'absent'; the methods are none, ngram"),
        (DrafterBuild("a", "random", "lyanna", {"depth": 3}), "drafter a: unknown key depth; known keys are"),
        (DrafterBuild("a", "m.gguf", "lyanna"), "m.gguf is a model, and a drafter of lyanna is not"),
    ],
)
def test_a_drafter_that_cannot_be_built(drafter: DrafterBuild, message: str) -> None:
    with pytest.raises(RedraftError, match=message):
        opened(drafter)


def opened(drafter: DrafterBuild, checkpoint: Any = None) -> OpenedDrafter:
    """Open a drafter, which may depend on the verifier's checkpoint."""
    return open_drafter(settings_of(drafter, BuildConfig()), checkpoint, Identity((), ""), BuildConfig())


def test_a_build_reads_the_hidden_states_of_its_drafters(checkpoint: Path, tmp_path: Path) -> None:
    """A recipe's settings without a folder are left out."""
    own, waiting = DrafterBuild("a", "random", "lyanna"), DrafterBuild("b", None, "lyanna")
    config = BuildConfig(drafters=(own, waiting), hidden_states=("1",))
    request = BuildRequest("m", texts={})
    build = resolve_build(
        Model("m", "m", checkpoint), Target.of(config, None), tmp_path / "out", request, lambda line: None
    )
    assert build.config.hidden_states == ("1", "last")
    assert [drafter.id for drafter in build.drafters] == ["a"]
    assert build.config.drafters == (own,)
    assert build.state_texts == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("random_weights", [False, True])
def test_a_factorized_head_needs_hidden_states_of_text(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_weights: bool
) -> None:
    """Another text makes another bundle. A verifier with random weights has no states worth it."""
    drafters = (DrafterBuild("a", "random", "lyanna", {"head_rank": 9}),)
    config = BuildConfig(drafters=drafters, random_weights=random_weights)
    texts, keys = {"code": tmp_path / "code.txt"}, set()
    monkeypatch.setattr(resolve, "held_out_texts", lambda: texts)
    for text in ("x = 1", "y = 2"):
        texts["code"].write_text(text)
        request, target = BuildRequest("m", texts={}), Target.of(config, None)
        build = resolve.resolve_build(Model("m", "m", checkpoint), target, tmp_path / "out", request, lambda line: None)
        assert build.state_texts == ({} if random_weights else {"code": text})
        keys.add(build.key)
    assert len(keys) == (1 if random_weights else 2)
