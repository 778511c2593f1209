"""The check of a graph against the parser: the error names node, operator and hint."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from redraft.engines.tensorrt.operators import RTX_FILE, SINCE, SUPPORTED, check, problems
from redraft.errors import BackendError

FLOAT, INT64, UINT8, INT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.INT8


def model(*nodes: NodeProto, opset: int = 24, **inputs: tuple[int, list[int]]) -> onnx.ModelProto:
    """A graph of these nodes; inputs by name, type and shape; `axes` and `k` are initializers."""
    made = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    numbers = [numpy_helper.from_array(np.array([4000]), "k"), numpy_helper.from_array(np.array([-1]), "axes")]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(list(nodes), "g", made, [], numbers), opset_imports=opsets)


def node(op: str, *inputs: str, outputs: tuple[str, ...] = ("y",), domain: str = "", **attributes: object) -> NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=f"node of {op}", domain=domain, **attributes)


def test_the_answers_of_tensorrt_for_rtx_are_of_the_installed_version() -> None:
    """Ask again: `python -m experiments.tensorrt_operators --write`."""
    rtx = pytest.importorskip("tensorrt_rtx_bindings")
    assert json.loads(RTX_FILE.read_bytes())["version"] == rtx.__version__


CASES = {
    "unknown operator": (model(node("BitShift", "x", "x", direction="LEFT"), x=(UINT8, [2])), "BitShift"),
    "other domain": (
        model(node("MatMulNBits", "x", domain="com.microsoft", K=1, N=1), x=(FLOAT, [2])),
        "com.microsoft::MatMulNBits",
    ),
    "element type": (model(node("Softmax", "x"), x=(INT64, [2])), "Softmax of int64"),
    "bytes are looked up": (model(node("Gather", "x", "i"), x=(UINT8, [2]), i=(INT64, [1])), "Gather of uint8"),
    "type of an inner value": (
        model(node("Shape", "x", outputs=("s",)), node("Sqrt", "s"), x=(FLOAT, [2])),
        "Sqrt of int64",
    ),
    "many of them": (model(node("TopK", "x", "k", outputs=("y", "z")), x=(FLOAT, [1, 9000])), "TopK of 4000"),
    "unsorted": (model(node("TopK", "x", "n", outputs=("y", "z"), sorted=0), x=(FLOAT, [9]), n=(INT64, [1])), "sort"),
    "computed axes": (model(node("ReduceMean", "x", "a"), x=(FLOAT, [2]), a=(INT64, [1])), "ReduceMean over computed"),
    "zero point": (
        model(node("DequantizeLinear", "x", "s", "z"), x=(INT8, [2]), s=(FLOAT, []), z=(INT8, [])),
        "DequantizeLinear with a zero point",
    ),
    "rank": (
        model(node("TensorScatter", "x", "u", "i", axis=1), x=(FLOAT, [1, 9, 2]), u=(FLOAT, [1, 2, 2]), i=(INT64, [1])),
        "TensorScatter of 3 dimensions along axis 1",
    ),
    "lengths": (
        model(node("Attention", "q", "q", "q", "", "", "", "n"), q=(FLOAT, [1, 1, 2, 8]), n=(INT64, [1])),
        "Attention with n",
    ),
    "softcap": (
        model(node("Attention", "q", "q", "q", softcap=2.0), q=(FLOAT, [1, 1, 2, 8])),
        "Attention with softcap",
    ),
    "bytes are made": (model(node("Cast", "x", to=UINT8), x=(INT64, [2])), "Cast to uint8"),
    "sizes that the data decides": (model(node("NonZero", "x"), x=(FLOAT, [2])), "NonZero"),
    "opset": (model(node("Sqrt", "x"), opset=25, x=(FLOAT, [2])), "opset 25"),
}


@pytest.mark.parametrize("case", CASES)
def test_nodes_that_the_parser_does_not_take_are_named(case: str) -> None:
    found, problem = CASES[case]
    lines = list(problems(found, (11, 4)))
    assert len(lines) == 1, lines
    assert problem in lines[0]
    if case != "opset":
        assert f"node 'node of {found.graph.node[-1].op_type}'" in lines[0]


def test_nodes_that_the_parser_takes_pass() -> None:
    nodes = [
        node("Shape", "x", outputs=("s",)),
        node("ReduceMean", "x", "axes", outputs=("m",)),
        node("Cast", "b", outputs=("c",), to=FLOAT),
        node("Where", "t", "x", "x", outputs=("w",)),
        node("DequantizeLinear", "e", "one", outputs=("d",)),
        node("Equal", "t", "t", outputs=("q",)),
        node("Pad", "t", "pads", outputs=("p",)),
        node("TreeAttention", "x"),
    ]
    kinds = {
        "x": (FLOAT, [2]), "b": (UINT8, [2]), "t": (TensorProto.BOOL, [2]), "e": (INT8, [2]), "one": (FLOAT, []),
        "pads": (INT64, [2]),
    }  # fmt: skip
    assert list(problems(model(*nodes, **kinds), (10, 9))) == []


@pytest.mark.parametrize("operator", SINCE)
def test_newer_operators_are_taken_from_their_version_on(operator: str) -> None:
    graph = model(node(operator, "x", "x", "x"), x=(FLOAT, [1, 1, 2, 8]))
    major, minor = SINCE[operator]
    assert f"known from {major}.{minor}" in next(problems(graph, (major, minor - 1)))
    assert not any("known from" in line for line in problems(graph, SINCE[operator]))


def test_the_table_holds_operators_of_onnx_only() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert set(SUPPORTED) <= known
    assert set(SINCE) <= set(SUPPORTED)


def test_the_error_is_one_line_with_a_hint() -> None:
    graph = CASES["bytes are looked up"][0]
    with pytest.raises(
        BackendError, match=r"draft: node 'node of Gather' is Gather of uint8.*; build the drafter with token_info=fp16"
    ):
        check("draft", graph, (10, 13))
