"""Weight-only quantization for TensorRT, in standard operators: codes, DequantizeLinear, the product.

TensorRT requires symmetric quantization: w ≈ code * scale. A weight [N, K] is stored transposed, codes [K, N]:

    int8, fp8 (E4M3)    one scale for each output, [N]
    int4                one scale for 128 inputs of an output, or 64 if 128 does not divide K: [K / 128, N]

The product of the logits keeps its weights. With int4, so do products unless K is a multiple of 64 and N of 2.
TensorRT's documentation promises weight-only kernels for int4. TensorRT may dequantize other weights first.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from redraft.export.checkpoint.weight_files import ONNX_TYPES, NewTensor, Slabs
from redraft.export.graph.edit import unplaced
from redraft.export.quantization.product_weights import ProductWeight, feeds
from redraft.export.quantization.rounding import packed

Kind = Literal["int8", "int4", "fp8"]
LARGEST: dict[Kind, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
STORED: dict[Kind, str] = {"int8": "I8", "int4": "I4", "fp8": "F8_E4M3"}
BLOCKS = (128, 64)
_SMALLEST_SCALE = 2.0**-24
"""The smallest fp16: TensorRT takes positive scales only."""


def block_of(kind: Kind, inputs: int, outputs: int) -> int | None:
    """Return the number of inputs that share a scale, 0 for all of them, or None if the weight does not fit."""
    if kind != "int4":
        return 0
    return next((block for block in BLOCKS if inputs % block == 0 and outputs % 2 == 0), None)


def scales_of(weight: NDArray[np.float32], kind: Kind, dtype: Any, block: int) -> NDArray[Any]:
    """Return scales of a weight [N, K]: [N], or [N, K / block]. Codes use these rounded values."""
    parts = weight.reshape(len(weight), -1, block) if block else weight[:, None]
    scales = np.abs(parts).max(-1) / LARGEST[kind]
    rounded: NDArray[Any] = np.maximum(np.where(scales == 0, 1, scales), _SMALLEST_SCALE).astype(dtype)
    return rounded if block else rounded[:, 0]


def codes_of(weight: NDArray[np.float32], scales: NDArray[Any], kind: Kind, block: int) -> NDArray[np.int8]:
    """Return codes of a weight [N, K], one a byte: int8, or the bits of float8 E4M3."""
    wide = scales.astype(np.float32)
    spread = np.repeat(wide, block, axis=1) if block else wide[:, None]
    scaled = np.clip(weight / spread, -LARGEST[kind], LARGEST[kind])
    codes: NDArray[np.int8] = (
        scaled.astype(ml_dtypes.float8_e4m3fn).view(np.int8) if kind == "fp8" else np.rint(scaled).astype(np.int8)
    )
    return codes


def dequantize_products(model: ir.Model, source: Any, kind: Kind, output: str) -> list[NewTensor]:
    """Let products over stored weights read codes, in place, except the product of `output`.

    Returns the tensors to write. `source` gives the parameters' shapes and, in slabs of rows, their values.
    """
    last = next((value.producer() for value in model.graph.outputs if value.name == output), None)
    tensors: dict[str, NewTensor] = {}
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        weight = ProductWeight.of(node, source.parameters)
        if weight is not None and not feeds(node, last):
            tensors |= _dequantized(model, node, weight, source, kind)
    common.RemoveUnusedNodesPass()(model)
    return list(tensors.values())


def _dequantized(
    model: ir.Model, node: ir.Node, weight: ProductWeight, source: Any, kind: Kind
) -> dict[str, NewTensor]:
    outputs, inputs = weight.shape(source)
    block = block_of(kind, inputs, outputs)
    dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
    if block is None or dtype is None:
        return {}
    name = f"{weight.stem}.{kind}"
    read = partial(_read, source, weight, kind, dtype.numpy(), block)
    scales = (inputs // block, outputs) if block else (outputs,)
    tensors = [
        NewTensor(name, STORED[kind], (inputs, outputs), partial(read, codes=True)),
        NewTensor(f"{name}.scales", _SCALES[dtype], scales, partial(read, codes=False)),
    ]
    values = [unplaced(model, each.name, ONNX_TYPES[each.dtype], each.shape) for each in tensors]
    attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
    spread = ir.node("DequantizeLinear", values, attributes, name=f"{name}.dequantize")
    spread.outputs[0].name = f"{name}.value.{len(model.graph)}"
    spread.outputs[0].type, spread.outputs[0].shape = ir.TensorType(dtype), ir.Shape((inputs, outputs))
    model.graph.insert_before(node, spread)
    node.replace_input_with(1, spread.outputs[0])
    return {each.name: each for each in tensors}


_SCALES = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}


def _read(source: Any, weight: ProductWeight, kind: Kind, dtype: Any, block: int, codes: bool) -> Slabs:
    """Return codes [K, N] or scales of the weight, in stored form."""
    parts = []
    for slab in weight.slabs(source):
        scales = scales_of(slab, kind, dtype, block)
        parts.append(codes_of(slab, scales, kind, block) if codes else scales)
    whole = np.ascontiguousarray(np.concatenate(parts).T)
    if codes and kind == "int4":
        whole = packed(whole.view(np.uint8) & np.uint8(15), 4)
    yield whole.view(np.uint16) if whole.dtype == ml_dtypes.bfloat16 else whole
