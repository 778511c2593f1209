"""Chains with the plugin: the KV buffer between two nodes is an output, to be bound to the buffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from redraft import names
from redraft.engines.tensorrt.prepare import graph_file, prepare
from redraft.export.graph.tree_attention import bodies
from tests.engines.calls import sampling_values
from tests.engines.drafters import LYANNA_DRAFT
from tests.export.drafters.tiny import CONFIG, Exported, export, make_verifier

CACHES = (names.key_cache(0), names.value_cache(0))
LINKS = [names.link(cache, number) for number, cache in enumerate(CACHES * (CONFIG.steps - 1), 1)]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("chain")
    (folder / "verifier").mkdir()
    exported = export(folder, make_verifier(folder / "verifier"))
    prepare(exported.bundle.path, f"{LYANNA_DRAFT}.onnx", LYANNA_DRAFT, (10, 9), "plugin")
    return exported


def test_every_link_is_an_output_of_the_buffers_type_and_sizes(drafter: Exported) -> None:
    graph = onnx.load(drafter.bundle.path / graph_file(LYANNA_DRAFT), load_external_data=False).graph
    portable = onnx.load(drafter.bundle.path / f"{LYANNA_DRAFT}.onnx", load_external_data=False).graph
    assert [output.name for output in graph.output] == [*(output.name for output in portable.output), *LINKS]
    assert [names.linked(name) for name in LINKS] == [*CACHES] * (CONFIG.steps - 1)
    buffers = {each.name: each.type for each in graph.input}
    for output in graph.output:
        if cache := names.linked(output.name):
            assert output.type == buffers[cache]
    nodes = [node for node in graph.node if node.op_type == names.TREE_ATTENTION]
    taken = [name for node in nodes for name in node.input[3:5]]
    given = [name for node in nodes for name in node.output[1:3]]
    assert taken == [*CACHES, *LINKS]
    assert given == [*LINKS, *map(names.present, CACHES)]


def test_the_draft_is_the_same(drafter: Exported) -> None:
    """ONNX Runtime runs the graph with the operator's body restored."""
    path = drafter.bundle.path / "chain.onnx"
    model = onnx.load(drafter.bundle.path / graph_file(LYANNA_DRAFT))
    for node in model.graph.node:
        if node.op_type == names.TREE_ATTENTION:
            node.domain = names.TREE_ATTENTION_DOMAIN
            del node.attribute[-2:]
    model.functions.extend(bodies(False))
    model.opset_import.append(onnx.helper.make_opsetid(names.TREE_ATTENTION_DOMAIN, 1))
    onnx.save(model, path)
    found, expected = (draft(drafter, each) for each in (path, drafter.bundle.path / f"{LYANNA_DRAFT}.onnx"))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-4, atol=2e-4, err_msg=name)


def draft(drafter: Exported, path: Path) -> dict[str, np.ndarray]:
    shape, random = drafter.shape, np.random.default_rng(0)
    rows, cache_len = 4, np.array([2, 5])
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    size = (2, shape.kv_heads, 40, shape.head_dim)
    found = session.run(None, {
        names.FEATURE_ROWS: random.standard_normal((2, rows, shape.hidden)).astype(np.float32),
        names.TOKENS: random.integers(0, shape.vocabulary, (2, rows)),
        names.POSITIONS: cache_len[:, None] + np.arange(rows), names.NUM_PENDING: np.array([4, 2]),
        names.CACHE_LEN: cache_len, names.KV_LEN: np.array([9]),
        **sampling_values(2, shape.steps),
        **{cache: random.standard_normal(size).astype(np.float32) for cache in CACHES}, **drafter.tables,
    })  # fmt: skip
    return dict(zip([output.name for output in session.get_outputs()], found, strict=True))
