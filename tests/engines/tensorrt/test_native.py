"""Chains and kept rows prepared for TensorRT: the form of their graphs. tests/engines/test_gpu_attention.py runs them.

TensorRT's KV update writes to the memory of an input, so a buffer has one: a chain's later rows are not written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from redraft import names, signatures
from redraft.engines import Bundle
from redraft.engines.tensorrt.native import lower_attention
from redraft.engines.tensorrt.operators import problems
from redraft.engines.tensorrt.prepare import prepare
from redraft.errors import BackendError
from redraft.export.graph.step_graphs import export_step_graphs
from redraft.signatures import VerifierShape
from tests.engines.drafters import LYANNA_DRAFT
from tests.runtime.lyanna_bundle import STEPS

RELEASE = (10, 15)
CACHES = (names.key_cache(0), names.value_cache(0))
LINKS = [names.link(cache, number) for number, cache in enumerate(CACHES * (STEPS - 1), 1)]
SHAPE = VerifierShape(layers=2, kv_heads=2, head_dim=8, hidden=12, vocabulary=9, max_positions=64)


def test_with_the_plugin_the_buffers_between_nodes_are_outputs(drafted: Bundle) -> None:
    """They are bound to the buffer's own memory, so they have its type and sizes."""
    file = f"{LYANNA_DRAFT}.onnx"
    graph = prepare(drafted.path, file, LYANNA_DRAFT, (10, 9), "plugin").graph
    portable = onnx.load(drafted.path / file, load_external_data=False).graph
    assert [output.name for output in graph.output] == [*(output.name for output in portable.output), *LINKS]
    assert [names.linked(name) for name in LINKS] == [*CACHES] * (STEPS - 1)
    buffers = {each.name: each.type for each in graph.input}
    assert all(output.type == buffers[cache] for output in graph.output if (cache := names.linked(output.name)))
    nodes = [node for node in graph.node if node.op_type == names.TREE_ATTENTION]
    assert [name for node in nodes for name in node.input[3:5]] == [*CACHES, *LINKS]
    assert [name for node in nodes for name in node.output[1:3]] == [*LINKS, *map(names.present, CACHES)]


def test_every_buffer_is_updated_once_from_an_input_to_an_output(drafted: Bundle) -> None:
    """TensorRT's KV update can do only this."""
    graph = prepare(drafted.path, f"{LYANNA_DRAFT}.onnx", LYANNA_DRAFT, RELEASE, "native").graph
    updates = [(node.input[0], node.output[0]) for node in graph.node if node.op_type == "TensorScatter"]
    assert updates == [(cache, names.present(cache)) for cache in CACHES]
    assert {output.name for output in graph.output} == {spec.name for spec in drafted.graph(LYANNA_DRAFT).outputs}
    assert sum(node.op_type == "Attention" for node in graph.node) == STEPS


@pytest.mark.parametrize("change", ["two rows on", "window", "another's row"])
def test_nodes_that_do_not_follow_row_by_row_are_refused(change: str, drafted: Bundle) -> None:
    model = ir.load(drafted.path / f"{LYANNA_DRAFT}.onnx")
    third = [node for node in model.graph if node.op_type == names.TREE_ATTENTION][2]
    if change == "window":
        third.attributes["window"] = ir.AttrInt64("window", 4)
    elif change == "two rows on":
        two = ir.Value(name="two", const_value=ir.tensor(np.array(2), name="two"))
        model.graph.register_initializer(two)
        third.inputs[7].producer().replace_input_with(1, two)
    else:
        third.replace_input_with(4, next(value for value in model.graph.inputs if value.name == names.value_cache(0)))
    with pytest.raises(
        BackendError, match=r"another node wrote, and not its next row.*attention plugin, or without the"
    ):
        lower_attention(LYANNA_DRAFT, model, RELEASE)


def test_the_keeping_graph_updates_inputs_by_indices_of_a_fixed_length(tmp_path: Path) -> None:
    export_step_graphs(SHAPE, tmp_path, gathers=False)
    portable = onnx.load(tmp_path / f"{names.STEP_COMPACT_KV}.onnx")
    assert "GatherND by indices of a length that is computed" in next(problems(portable, RELEASE))
    model = prepare(tmp_path, f"{names.STEP_COMPACT_KV}.onnx", names.STEP_COMPACT_KV, RELEASE, "native")
    assert not list(problems(model, RELEASE))
    updated = [node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"]
    assert updated == signatures.caches(SHAPE)
    assert sum(node.op_type == "Reshape" for node in model.graph.node) == 1  # the indices are those of all buffers
