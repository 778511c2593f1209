"""Operators of TensorRT's ONNX parsers, and the check of a graph against them before a build.

TensorRT's are from onnx-tensorrt's docs/operators.md and its changelog, 10.9 to 11.2. Later versions count as the last
one. Those of TensorRT for RTX are its parser's own answers (operators_rtx.json, `experiments.tensorrt_operators`). Its
parser is also the only one that was asked: a type that it takes, and that TensorRT's documentation lacks, is no error
there, but for quantized types.
A release is a major and a minor version: from 10 on of TensorRT, 1 of TensorRT for RTX.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

from redraft.engines.tensorrt import plugin
from redraft.engines.tensorrt.target import NATIVE_FROM, RTX, TENSORRT
from redraft.errors import BackendError

Release = tuple[int, int]
OPSETS = (9, 24)

_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_NUMBERS = _FLOATS | {TensorProto.INT32, TensorProto.INT64}
_VALUES = _NUMBERS | {TensorProto.BOOL}
_CASTS = _VALUES | {TensorProto.UINT8}
_QUANTIZED = frozenset({TensorProto.INT8, TensorProto.INT4, TensorProto.FLOAT8E4M3FN})
_HALVES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
_BOOLEANS = frozenset({TensorProto.BOOL})

_TYPES: Mapping[frozenset[int], str] = {
    _FLOATS: """
        Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Celu Clip Conv ConvTranspose Cos
        Cosh CumSum Dropout Einsum Elu Erf Exp Floor Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
        GroupNormalization GRU HardSigmoid HardSwish Hardmax InstanceNormalization IsInf LayerNormalization
        LeakyRelu Log LogSoftmax LpNormalization LpPool LRN LSTM MatMul MaxPool MeanVarianceNormalization PRelu
        QuantizeLinear RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal Resize
        RMSNormalization RNN RotaryEmbedding Round Scan Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt
        Swish Tan Tanh ThresholdedRelu Upsample Attention
    """,
    _NUMBERS: """
        Abs Add ArgMax ArgMin DepthToSpace Div Equal Gelu Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean
        Min Mod Mul Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
        ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Scatter ScatterElements ScatterND Shrink Sign
        SpaceToDepth Sub Sum TopK
    """,
    _VALUES: """
        Concat Expand EyeLike Flatten Gather GatherElements GatherND Identity If Loop OneHot Reshape
        ReverseSequence Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where
    """,
    _CASTS: "Cast CastLike",
    _BOOLEANS: "And Not Or Xor",
    _HALVES: "BlackmanWindow DeformConv GridSample HammingWindow HannWindow Mish NonMaxSuppression RoiAlign",
    _QUANTIZED: "DequantizeLinear",
    _FLOATS | {TensorProto.INT32}: "TensorScatter",
}  # fmt: skip
SUPPORTED: Mapping[str, frozenset[int]] = {
    operator: types for types, listed in _TYPES.items() for operator in listed.split()
} | {"Constant": frozenset(), "ConstantOfShape": frozenset()}
"""Element types of the data input by operator in TensorRT's documentation; empty for any type."""
RTX_FILE = Path(__file__).with_name("operators_rtx.json")

SINCE: Mapping[str, Release] = {
    "Attention": (10, 14), "RMSNormalization": (10, 15), "RotaryEmbedding": (10, 15), "TensorScatter": NATIVE_FROM,
    "Swish": (11, 0),
}  # fmt: skip
"""Operators that came after the oldest version supported."""

_DATA_INPUT = {"Where": 1}
_MOST_TOPK = 3839
_SCATTER_RANK = 4


@cache
def rtx_types() -> Mapping[str, frozenset[int]]:
    """Return the element types by operator that the parser of TensorRT for RTX took."""
    found = json.loads(RTX_FILE.read_bytes())["types"]
    types = {name: frozenset(map(TensorProto.DataType.Value, kinds)) for name, kinds in found.items() if kinds}
    return {**types, "Constant": frozenset(), "ConstantOfShape": frozenset()}


def of_rtx(release: Release) -> bool:
    """Return True for a release of TensorRT for RTX."""
    return release < TENSORRT.oldest


def lacks(operator: str, release: Release) -> bool:
    """Return True if the parser does not know an operator that later ones, or others, know."""
    if of_rtx(release):
        return operator not in rtx_types()
    return SINCE.get(operator, (0, 0)) > release


def check(graph: str, model: onnx.ModelProto, release: Release) -> None:
    """Raise BackendError naming the first node of the prepared graph that the parser of `release` does not take."""
    for line in problems(model, release):
        title = f"{(RTX if of_rtx(release) else TENSORRT).title} {'.'.join(map(str, release))}"
        raise BackendError(f"{graph}: {line}, which the ONNX parser of {title} does not take", _hint(line, release))


def problems(model: onnx.ModelProto, release: Release) -> Iterator[str]:
    """Yield one line for every node that the parser does not take: its name, its operator, and the problem."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if not OPSETS[0] <= opset <= OPSETS[1]:
        yield f"opset {opset}, expected {OPSETS[0]} to {OPSETS[1]}"
    inferred = onnx.shape_inference.infer_shapes(model)
    constants = _constants(model.graph)
    types = _types(inferred.graph)
    for node in model.graph.node:
        if (problem := _problem(node, types, constants, inferred.graph, release)) is not None:
            yield f"node {node.name or node.output[0]!r} is {_operator(node)}{problem}"


def _operator(node: NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _problem(
    node: NodeProto, types: Mapping[str, int], constants: set[str], graph: onnx.GraphProto, release: Release
) -> str | None:
    """Return the problem with a node: empty if the parser does not know the operator at all, None without a problem."""
    if node.op_type == plugin.NAME and node.domain == "":
        return None
    rtx = rtx_types()
    listed = rtx if of_rtx(release) else SUPPORTED
    if node.domain not in ("", "ai.onnx") or node.op_type not in listed:
        return ""
    if not of_rtx(release) and lacks(node.op_type, release):
        since = SINCE[node.op_type]
        return f" (known from {since[0]}.{since[1]})"
    data = _DATA_INPUT.get(node.op_type, 0)
    name = node.input[data] if len(node.input) > data else ""
    allowed, found = listed[node.op_type], types.get(name)
    if allowed and not of_rtx(release):
        allowed |= rtx.get(node.op_type, frozenset()) - _QUANTIZED
    if allowed and found is not None and found not in allowed:
        return f" of {helper.tensor_dtype_to_string(found).removeprefix('TensorProto.').lower()}"
    return _limit(node, constants, graph)


def _limit(node: NodeProto, constants: set[str], graph: onnx.GraphProto) -> str | None:  # noqa: C901, PLR0912 - one branch for each limit of TensorRT's documentation
    """Return the problem with an operator that the parser takes in some forms only."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    match node.op_type:
        case "TensorScatter":
            known, axis = _dims(node.input[0], graph), attributes.get("axis", -2)
            rank = _SCATTER_RANK if known is None else len(known)
            if rank != _SCATTER_RANK or axis not in (-2, _SCATTER_RANK - 2):
                return f" of {rank} dimensions along axis {axis}, expected four and -2"
        case "GatherND":
            known = _dims(node.input[1], graph)
            if node.input[1] not in constants and not (known and known[-1].HasField("dim_value")):
                return " by indices of a length that is computed"
        case "Attention":
            if attributes.get("softcap") or attributes.get("qk_matmul_output_mode"):
                return " with softcap or qk_matmul_output_mode"
            if surplus := [name for name in (*node.input[4:], *node.output[1:]) if name]:
                return f" with {surplus[0]}"
        case "TopK":
            if attributes.get("sorted", 1) != 1:
                return " that does not sort"
            count = next((t for t in graph.initializer if t.name == node.input[1]), None)
            if count is not None and count.HasField("raw_data"):
                most = int(onnx.numpy_helper.to_array(count).max())
                return None if most <= _MOST_TOPK else f" of {most}, expected at most {_MOST_TOPK}"
        case "Cast":
            return " to uint8" if attributes.get("to") == TensorProto.UINT8 else None
        case "DequantizeLinear":
            return " with a zero point" if len(node.input) > 2 and node.input[2] else None
        case reduction if reduction.startswith("Reduce"):
            computed = len(node.input) > 1 and node.input[1] and node.input[1] not in constants
            return " over computed axes" if computed else None
    return None


def _dims(name: str, graph: onnx.GraphProto) -> Sequence[onnx.TensorShapeProto.Dimension] | None:
    values = (*graph.input, *graph.value_info, *graph.output)
    return next((value.type.tensor_type.shape.dim for value in values if value.name == name), None)


def _constants(graph: onnx.GraphProto) -> set[str]:
    constants = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    return constants | {tensor.name for tensor in graph.initializer}


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    found = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
    return {**found, **{tensor.name: tensor.data_type for tensor in graph.initializer}}


def _hint(line: str, release: Release) -> str:
    if "MatMulNBits" in line:
        return "build with --backend tensorrt, which quantizes by DequantizeLinear"
    if " of uint8" in line or " of int8" in line:
        return "build the drafter with token_info=fp16"
    if ("Attention" in line or "TensorScatter" in line) and not of_rtx(release):
        return "build with --attention plugin"
    return "use a newer TensorRT, or build with --backend onnxruntime"
