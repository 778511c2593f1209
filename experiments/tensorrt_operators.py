"""Operators and element types that TensorRT for RTX takes, asked of its parser and builder.

    pip install -e '.[tensorrt-rtx]'
    python -m experiments.tensorrt_operators [--write]

Makes a graph of one node for each operator of `_NODES` and each element type, parses it, and builds it ahead of time:
the parser alone takes int8 nearly everywhere. --write puts the answers in engines/tensorrt/operators_rtx.json, which
the check of graphs reads. Prints them, and where they differ from the documentation of TensorRT
(`redraft.engines.tensorrt.operators.SUPPORTED`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from redraft.engines.tensorrt.native import DECOMPOSABLE
from redraft.engines.tensorrt.operators import RTX_FILE, SUPPORTED
from redraft.engines.tensorrt.target import RTX, import_tensorrt

OPSET = 24
TYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64", "BOOL", "UINT8", "INT8", "INT4", "FLOAT8E4M3FN")
_AXIS, _ONE, _SHAPE = np.array([1]), np.array(1), np.array([3, 2])
_ROWS, _PAIRS = np.zeros((2, 3), np.int64), np.zeros((2, 1), np.int64)
_UNARY = (
    "Abs Cos Exp Identity IsNaN Log Neg Not Reciprocal Relu Shape Sigmoid Sin Softplus Sqrt Tanh Transpose Size Erf "
    "Floor Ceil Round Sign Elu LeakyRelu Selu HardSigmoid HardSwish Mish Softsign IsInf"
)
_BINARY = "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Or Pow Sub Xor"
_REDUCE = (
    "ReduceMax ReduceMean ReduceMin ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare"
)
_NODES: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **{name: (("x",), {}) for name in _UNARY.split()},
    **{name: (("x", "y"), {}) for name in _BINARY.split()},
    **{name: (("x", _AXIS), {"keepdims": 1}) for name in _REDUCE.split()},
    "ArgMax": (("x",), {"axis": 1}), "ArgMin": (("x",), {"axis": 1}), "NonZero": (("x",), {}),
    "Attention": (("four", "four", "four"), {DECOMPOSABLE: 1}), "Cast": (("x",), {"to": TensorProto.FLOAT}),
    "CastLike": (("x", np.zeros(1, np.float32)), {}), "Clip": (("x",), {}), "Concat": (("x", "y"), {"axis": 0}),
    "CumSum": (("x", _ONE), {}), "DequantizeLinear": (("whole", np.ones((), np.float32)), {}),
    "Expand": (("x", np.array([2, 2, 3])), {}), "Flatten": (("x",), {}), "Gather": (("x", np.array([0])), {}),
    "GatherElements": (("x", _ROWS), {"axis": 0}), "GatherND": (("x", _PAIRS), {}), "Gelu": (("x",), {}),
    "Gemm": (("x", "square"), {}), "LayerNormalization": (("x", "row"), {}), "LogSoftmax": (("x",), {}),
    "MatMul": (("x", "square"), {}), "Mod": (("x", "y"), {}), "Pad": (("x", np.array([0, 1, 0, 1])), {}),
    "RMSNormalization": (("x", "row"), {}), "Range": (("zero", "three", "one"), {}),
    "Reshape": (("x", _SHAPE), {}), "RotaryEmbedding": (("four", "table", "table", np.zeros((1, 2), np.int64)), {}),
    "ScatterElements": (("x", _ROWS, "y"), {}), "ScatterND": (("x", _PAIRS, "y"), {}),
    "Slice": (("x", np.array([0]), np.array([1]), np.array([0])), {}), "Softmax": (("x",), {}),
    "Split": (("x",), {"num_outputs": 2}),
    "Squeeze": (("thin", np.array([0])), {}), "Swish": (("x",), {}),
    "TensorScatter": (("four", "rows", np.array([0])), {}),
    "Tile": (("x", np.array([2, 1])), {}), "TopK": (("x", _AXIS), {}), "Trilu": (("x",), {}),
    "Unsqueeze": (("x", np.array([0])), {}), "Where": ((np.ones((2, 3), bool), "x", "y"), {}),
    "BitShift": (("x", "y"), {"direction": "LEFT"}), "BitwiseAnd": (("x", "y"), {}),
}  # fmt: skip
"""Inputs and attributes by operator. A word is an input of the asked type and of a size in `_SIZES`."""
_SIZES = {
    "x": [2, 3], "y": [2, 3], "four": [1, 2, 2, 64], "rows": [1, 2, 1, 64], "square": [3, 3], "row": [3],
    "thin": [1, 3], "table": [2, 32],
}  # fmt: skip
_CONSTANTS = {"whole": [0, 1, 2, 3], "zero": 0, "one": 1, "three": 3}
"""Inputs of the asked type that are constants: quantized numbers are weights, and sizes must be known."""
_OUTPUTS = {"Split": 2, "TopK": 2}


def main() -> None:
    """Ask for everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the answers")
    write = parser.parse_args().write
    answers = asked()
    text = json.dumps(answers, indent=1) + "\n"
    if write:
        RTX_FILE.write_text(text)
    print(text)
    for line in differences(answers["types"]):
        print(line)


def asked() -> dict[str, Any]:
    """Return the parser's version, and the element types that it takes by operator."""
    tensorrt = import_tensorrt(product=RTX)
    types = {name: [kind for kind in TYPES if _taken(tensorrt, name, kind)] for name in sorted(_NODES)}
    return {"version": tensorrt.__version__, "types": types}


def differences(types: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each operator that TensorRT's documentation has with other types than these."""
    lines = []
    for name, found in types.items():
        documented = SUPPORTED.get(name)
        listed = {TensorProto.DataType.Name(kind) for kind in documented} if documented is not None else set()
        if more := sorted(set(found) - listed):
            lines.append(f"{name}: TensorRT for RTX takes {', '.join(more)} too")
        if less := sorted(listed - set(found)):
            lines.append(f"{name}: TensorRT for RTX does not take {', '.join(less)}")
    return lines


def _taken(tensorrt: Any, name: str, kind: str) -> bool:
    element = TensorProto.DataType.Value(kind)
    inputs, attributes = _NODES[name]
    words: list[str] = []
    values, constants = {}, []
    for place, given in enumerate(inputs):
        words.append(f"{given}_{place}" if isinstance(given, str) else f"constant_{place}")
        if isinstance(given, np.ndarray):
            constants.append(onnx.numpy_helper.from_array(given, words[-1]))
        elif given in _CONSTANTS:
            array = np.array(_CONSTANTS[given]).astype(helper.tensor_dtype_to_np_dtype(element))
            constants.append(onnx.numpy_helper.from_array(array, words[-1]))
        else:
            values[words[-1]] = helper.make_tensor_value_info(words[-1], element, _SIZES[given])
    outputs = [f"out_{number}" for number in range(_OUTPUTS.get(name, 1))]
    node = helper.make_node(name, words, outputs, **attributes)
    graph = helper.make_graph([node], name, list(values.values()), [], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)
    model.graph.output.extend(onnx.shape_inference.infer_shapes(model).graph.value_info)
    if len(model.graph.output) != len(outputs):
        return False  # not even ONNX has it for this type
    logger = tensorrt.Logger(tensorrt.ILogger.INTERNAL_ERROR)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString()):
        return False
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(tensorrt.ComputeCapability.SM89, 0)
    return builder.build_serialized_network(network, config) is not None


if __name__ == "__main__":
    main()
